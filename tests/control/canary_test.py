# SPDX-License-Identifier: Apache-2.0
"""What the self-test covers; engines_test.py runs it on each engine."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.base import EngineOptions, EngineStartError, Spec
from kvferry.control.engines.canary import self_test
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.engines.jax_engine import JaxEngine
from kvferry.control.engines.staging import StagingEngine

_PAGES = [Spec((2, 16, 2, 8), jnp.uint16)] * 3


class Recorder(FakeEngine):
    """A fake engine that remembers what was published, and can damage it."""

    def __init__(self, options: EngineOptions, damaged_bytes: int = 0) -> None:
        super().__init__(options, FakeNetwork())
        self.sets: list[list[tuple[int, str | None]]] = []
        self._damaged_bytes = damaged_bytes

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        self.sets.append([(array.nbytes, array.sharding.memory_kind) for array in arrays])
        held = list(arrays)
        for index, array in enumerate(held):
            if array.nbytes == self._damaged_bytes:
                host = np.array(array)
                host[-1] ^= 1
                held[index] = jax.device_put(host)
        super().publish(key, held, deadline_seconds)


@pytest.mark.parametrize(("chunk_bytes", "largest"), [(4096, 8193), (1 << 30, 80 << 20)])
def test_one_array_is_larger_than_a_piece_but_bounded(chunk_bytes: int, largest: int) -> None:
    engine = Recorder(EngineOptions(chunk_bytes=chunk_bytes))
    self_test(engine, engine.start(), _PAGES[:1])
    assert max(size for size, _ in engine.sets[0]) == largest
    assert all(size < 4096 for each in engine.sets[1:] for size, _ in each)


def test_damage_beyond_the_first_piece_is_found() -> None:
    engine = Recorder(EngineOptions(chunk_bytes=4096), damaged_bytes=8193)
    with pytest.raises(EngineStartError, match=r"uint8\[8193\].* arrived with other bytes"):
        self_test(engine, engine.start(), [])
    assert engine.counters()["published_keys"] == 0


def test_staged_pages_travel_from_host_memory() -> None:
    inner = Recorder(EngineOptions(chunk_bytes=4096))
    larger = [Spec((4, 16, 2, 8), jnp.uint16)] * 3
    engine = StagingEngine(inner, [larger, _PAGES], 2)
    self_test(engine, engine.start(), _PAGES[:1])
    assert inner.sets[-1] == [(1024, "pinned_host")] * 3
    assert engine.counters()["host_slots_leased"] == 0


def test_staged_pages_travel_over_the_real_engine() -> None:
    engine = StagingEngine(JaxEngine(EngineOptions(channels=1)), [_PAGES], 1)
    self_test(engine, engine.start(), _PAGES[:1])
    assert engine.counters()["published_keys"] == engine.counters()["host_slots_leased"] == 0
    engine.close()
