# SPDX-License-Identifier: Apache-2.0
"""The end-to-end checksum of pages: what it sees, what it does not depend on, and in a room."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.base import EngineOptions, Pull, Spec
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.kv_layout import LayoutMismatchError
from kvferry.control.kv_poll import KVPoll
from kvferry.control.peer import check_fit
from kvferry.control.verified_pages import VerifiedPages, page_digests
from kvferry.tests.control.pairs import (
    LAYERS,
    Pair,
    Pool,
    commit_all,
    fails,
    metadata,
    pair,
    wait_until,
)

DTYPES = ["uint8", "int8", "uint16", "bfloat16", "float16", "float32", "float8_e4m3fn"]


def _pages(dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (6, 4, 3, 8)
    bits = np.frombuffer(rng.bytes(math.prod(shape) * jnp.dtype(dtype).itemsize), np.uint8)
    return bits.copy().view(jnp.dtype(dtype)).reshape(shape)


def _digest(pages: np.ndarray, count: int = 5) -> list[int]:
    found = np.asarray(page_digests([jnp.asarray(pages)], jnp.int32(count)))
    assert found.shape == (1, 2) and found.dtype == np.uint32
    return [int(each) for each in found[0]]


def _expected(pages: np.ndarray, count: int) -> list[int]:
    words = pages.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[pages.dtype.itemsize])
    flat = [int(each) for each in words[:count].reshape(-1)]
    weighted = sum((2 * place + 1) * word for place, word in enumerate(flat))
    return [sum(flat) % 2**32, weighted % 2**32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_is_the_two_sums(dtype: str) -> None:
    for count in (0, 1, 5, 6):
        assert _digest(_pages(dtype), count) == _expected(_pages(dtype), count)


def _changed(pages: np.ndarray) -> None:
    pages.view(np.uint16)[2, 1, 1, 3] ^= 1 << 15


def _exchanged(pages: np.ndarray) -> None:
    pages[[1, 3]] = pages[[3, 1]]


def _stale(pages: np.ndarray) -> None:
    pages[4] = pages[0]


def _shifted(pages: np.ndarray) -> None:
    pages[:] = np.roll(pages.reshape(-1), 1).reshape(pages.shape)


@pytest.mark.parametrize("damage", [_changed, _exchanged, _stale, _shifted])
def test_damage_shows(damage: Callable[[np.ndarray], None]) -> None:
    pages = _pages("bfloat16")
    before = _digest(pages)
    damage(pages)
    assert _digest(pages) != before


def test_padding_and_placement_do_not_matter() -> None:
    pages = _pages("bfloat16")
    before = _digest(pages)
    pages[5] = 0
    assert _digest(pages) == before
    here, there = Pool(seed=1), Pool(seed=2)
    arrays = VerifiedPages(here).gather([7, 3, 12])
    other = VerifiedPages(there)
    other.scatter(arrays, [40, 41, 2])
    assert np.asarray(other.check(arrays, [40, 41, 2])).all()
    there.layers[1][41] += 1
    assert np.asarray(other.check(arrays, [40, 41, 2])).tolist() == [True, False, True]


def test_warm_pages_compile_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pages = VerifiedPages(Pool(seed=1))
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        pages.warm_up([1, 2, 4])
        assert "Compiling jit(page_digests)" in caplog.text
        caplog.clear()
        for count in (1, 2, 3):
            pages.check(pages.gather(list(range(count))), list(range(count)))
        assert "digests" not in caplog.text


def test_specs_describe_what_gather_yields() -> None:
    pages = VerifiedPages(Pool(seed=1))
    arrays = pages.gather([1, 2, 3])
    assert len(arrays) == LAYERS + 1
    assert [(each.shape, each.dtype) for each in arrays] == [
        (each.shape, each.dtype) for each in pages.specs(3)
    ]


def test_sharded_pages_have_one_replicated_digest() -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("tp",))
    heads = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "tp"))
    pages = np.arange(6 * 2 * 8, dtype=np.float32).reshape(6, 2, 8)

    class Sharded(Pool):
        def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
            return [jax.device_put(pages[list(page_ids)], heads)]

        def specs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
            return [jax.ShapeDtypeStruct((num_pages, 2, 8), jnp.float32, sharding=heads)]

    wrapped = VerifiedPages(Sharded())
    digest = wrapped.gather([0, 1, 2])[-1]
    assert digest.sharding.is_equivalent_to(wrapped.specs(3)[-1].sharding, 2)
    assert digest.sharding.is_fully_replicated
    assert np.asarray(digest)[0].tolist() == _expected(pages, 3)


class _Damaging(FakeEngine):
    """Flips one bit of one array of each pull of pages, as a bad memory would."""

    damage = True

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        pull = super().pull(address, key, specs, deadline_seconds)
        if self.damage and specs[0].dtype == np.uint16 and len(specs) == LAYERS + 1:
            result = pull.result

            def damaged() -> list[jax.Array]:
                arrays = result()
                arrays[1] = arrays[1].at[0, 0, 0, 0].set(arrays[1][0, 0, 0, 0] ^ 1)
                return arrays

            pull.result = damaged  # type: ignore[method-assign]
        return pull


@pytest.fixture(name="both")
def _both() -> Iterator[Pair]:
    network = FakeNetwork()
    engines = (FakeEngine(EngineOptions(), network), _Damaging(EngineOptions(), network))
    with pair(engines=engines, wrap=VerifiedPages) as made:
        yield made
        wait_until(made.at_baseline)


def test_a_damaged_chunk_fails_its_room_on_both_sides(both: Pair) -> None:
    engine = both.decode.engine
    assert isinstance(engine, _Damaging)
    engine.damage = False
    both.transfer()
    engine.damage = True
    sender, receiver = both.ready()
    assert sender.send([0, 1], last=False)
    wait_until(lambda: receiver.commit())
    reason = fails(receiver)
    assert "other contents than were sent" in reason and "the first is 1" in reason
    assert receiver.failure is not None and receiver.failure.status == 500
    assert "other contents" in fails(sender)
    assert both.decode.manager.counters()["corrupt_chunks"] == 1
    engine.damage = False
    both.transfer()


def test_several_chunks_and_one_without_pages(both: Pair) -> None:
    engine = both.decode.engine
    assert isinstance(engine, _Damaging)
    engine.damage = False
    sender, receiver = both.ready(5)
    assert sender.send([4, 2], last=False)
    assert sender.send([9, 0, 1], last=True, metadata=metadata())
    commit_all(receiver)
    both.check([4, 2, 9, 0, 1], both.reserved(5))
    sender, receiver = both.ready(0)
    assert sender.send([], last=True, metadata=metadata())
    commit_all(receiver)
    wait_until(lambda: sender.poll() is KVPoll.Success)


class _OnlyReadable:
    """A result that can be copied to the host; computing with it is an error."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._array, dtype)


class _Checked(VerifiedPages):
    """Looks at who computes with the result of a check: on a worker thread nobody may."""

    def check(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> Any:
        return _OnlyReadable(super().check(arrays, page_ids))


def test_workers_only_read_the_result_of_a_check() -> None:
    """All JAX programs belong to the step thread; another's may meet a compiler, or a deadlock."""
    with pair(wrap=_Checked) as made:
        made.transfer()
        wait_until(made.at_baseline)


def test_one_side_alone_is_refused_by_name() -> None:
    with pair(wrap=VerifiedPages) as checked, pair() as plain:
        ours = checked.prefill.manager.instance  # type: ignore[attr-defined]
        theirs = plain.decode.manager.instance  # type: ignore[attr-defined]
    with pytest.raises(LayoutMismatchError, match=r"setting verify_kv.* 1, .* 0"):
        check_fit(ours, theirs)


@pytest.mark.parametrize("engine", ["jax", "tcp"])
def test_real_engines_carry_digests(engine: str) -> None:
    with pair(engine, wrap=VerifiedPages) as made:
        made.transfer()
        wait_until(made.at_baseline)
