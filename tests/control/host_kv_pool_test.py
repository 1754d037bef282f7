# SPDX-License-Identifier: Apache-2.0
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.host_kv_pool import HostKVPool, HostSlot


def specs(layers: int = 2, dtype: str = "float32") -> list[jax.ShapeDtypeStruct]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return [
        jax.ShapeDtypeStruct((4, 2 + layer), dtype, sharding=sharding) for layer in range(layers)
    ]


def leased(pool: HostKVPool) -> HostSlot:
    slot = pool.try_lease()
    assert slot is not None
    return slot


def test_slots_are_allocated_once_in_host_memory() -> None:
    pool = HostKVPool(specs(), 2)
    assert pool.slot_bytes == 4 * (2 + 3) * 4
    slot = leased(pool)
    for array, spec in zip(slot.arrays, specs(), strict=True):
        assert array.shape == spec.shape and array.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(array, 0)


def test_exhaustion_is_an_answer_not_an_error() -> None:
    pool = HostKVPool(specs(), 2)
    first, second = pool.try_lease(), pool.try_lease()
    assert first is not None and second is not None and first.index != second.index
    assert pool.try_lease() is None
    assert (pool.num_free, pool.num_leased) == (0, 2)
    first.release()
    again = pool.try_lease()
    assert again is not None and again.index == first.index
    assert pool.counters() == {"host_slots": 2, "host_slots_leased": 2, "host_slots_refused": 1}


def test_a_slot_is_returned_exactly_once() -> None:
    pool = HostKVPool(specs(), 1)
    slot = leased(pool)
    slot.release()
    with pytest.raises(RuntimeError, match="host slot 0 was released before"):
        slot.release()
    with pytest.raises(RuntimeError, match="released before"):
        _ = slot.arrays
    with pytest.raises(RuntimeError, match="released before"):
        slot.update([])
    with pytest.raises(RuntimeError, match="host slot 0 is not on loan"):
        pool.take_back(0, [])
    assert pool.num_free == 1


def test_with_returns_it_whatever_happens() -> None:
    pool = HostKVPool(specs(), 1)
    with pytest.raises(KeyError):
        with leased(pool):
            raise KeyError
    assert pool.num_free == 1
    with leased(pool) as slot:
        slot.release()
    assert pool.num_free == 1


def test_donated_arrays_are_replaced_and_stay_in_the_pool() -> None:
    pool = HostKVPool(specs(1), 1)
    slot = leased(pool)
    slot.update([jnp.full((4, 2), 5.0, jnp.float32)])
    slot.release()
    again = leased(pool)
    np.testing.assert_array_equal(again.arrays[0], 5.0)


def test_arrays_of_another_kind_are_refused() -> None:
    slot = leased(HostKVPool(specs(2), 1))
    good = slot.arrays
    with pytest.raises(ValueError, match="holds 2 arrays, got 1"):
        slot.update(good[:1])
    with pytest.raises(ValueError, match=r"array 1 must be float32\[4, 3\], got float32\[4, 2\]"):
        slot.update([good[0], good[0]])
    with pytest.raises(ValueError, match=r"array 0 must be float32\[4, 2\], got int32"):
        slot.update([jnp.zeros((4, 2), jnp.int32), good[1]])


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        HostKVPool(specs(), 0)
    with pytest.raises(ValueError, match="at least one array per slot"):
        HostKVPool([], 1)


def test_own_allocation() -> None:
    made: list[jax.ShapeDtypeStruct] = []

    def allocate(spec: jax.ShapeDtypeStruct) -> jax.Array:
        made.append(spec)
        return jnp.ones(spec.shape, spec.dtype)

    pool = HostKVPool(specs(3), 4, allocate=allocate)
    assert len(made) == 12
    slot = leased(pool)
    np.testing.assert_array_equal(slot.arrays[2], 1)


def test_threads_never_share_a_slot() -> None:
    pool = HostKVPool(specs(1), 3)
    held: set[int] = set()
    clashes: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            slot = pool.try_lease()
            if slot is None:
                continue
            if slot.index in held:
                clashes.append(slot.index)
            held.add(slot.index)
            for _ in range(rng.randrange(50)):
                pass
            held.discard(slot.index)
            slot.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes and pool.num_free == 3
