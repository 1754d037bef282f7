# SPDX-License-Identifier: Apache-2.0
"""Staging in host slots: what travels is the slot, and every slot comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.base import EngineOptions, Spec, TransferError
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.engines.staging import StagingEngine

_SPECS = [Spec((4, 16, 2, 8), jnp.float32)] * 3


def _arrays(seed: int) -> list[jax.Array]:
    choose = np.random.default_rng(seed)
    return [jnp.asarray(choose.random(spec.shape, np.float32)) for spec in _SPECS]


class Staged:
    """A staging engine with two slots, and a puller."""

    def __init__(self) -> None:
        network = FakeNetwork()
        self.source = StagingEngine(FakeEngine(EngineOptions(), network), [_SPECS], 2)
        self.target = FakeEngine(EngineOptions(), network)
        self.address = self.source.start()
        self.target.start()

    @property
    def leased(self) -> int:
        return self.source.counters()["host_slots_leased"]

    def pull(self, key: int) -> list[jax.Array]:
        pull = self.target.pull(self.address, key, _SPECS, 5.0)
        assert pull.wait(5.0)
        return pull.result()


def test_pages_travel_through_slots_again_and_again() -> None:
    staged = Staged()
    for key in range(6):
        arrays = _arrays(key)
        staged.source.publish(key, arrays, 30.0)
        assert staged.leased == 1
        # What was gathered is no longer needed: the slot holds the pages.
        wanted = [np.asarray(array).copy() for array in arrays]
        for array in arrays:
            array.delete()
        for found, expected in zip(staged.pull(key), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)
        staged.source.release(key, delivered=True)
        assert staged.leased == 0


def test_no_slot_left_is_back_pressure_until_a_release() -> None:
    staged = Staged()
    for key in (1, 2):
        staged.source.publish(key, _arrays(key), 30.0)
    assert not staged.source.has_room(_SPECS)
    with pytest.raises(TransferError, match="all 2 host slots of this size are on loan"):
        staged.source.publish(3, _arrays(3), 30.0)
    staged.source.release(1, delivered=False)
    assert staged.source.has_room(_SPECS)
    staged.source.publish(3, _arrays(3), 30.0)
    staged.source.close()
    assert staged.leased == 0


def test_a_refused_publication_keeps_no_slot() -> None:
    staged = Staged()
    staged.source.publish(1, _arrays(1), 30.0)
    with pytest.raises((ValueError, TransferError)):
        staged.source.publish(1, _arrays(2), 30.0)
    assert staged.leased == 1
    staged.source.release(1, delivered=True)
    assert staged.leased == 0


def test_other_arrays_are_not_staged() -> None:
    staged = Staged()
    staged.source.publish(1, [jnp.arange(5)], 30.0)
    assert staged.leased == 0
    staged.source.release(1, delivered=True)


def test_release_of_unknown_keys_is_ignored() -> None:
    staged = Staged()
    staged.source.release(99, delivered=False)
    assert staged.leased == 0
