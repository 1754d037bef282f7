# SPDX-License-Identifier: Apache-2.0
"""Memory is used again, but never while anything can still see it."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.tcp_buffers import BufferPool
from kvferry.tests.control.pairs import wait_until

MIB = 1 << 20


def where(memory: np.ndarray) -> int:
    return int(memory.ctypes.data)


def is_back(pool: BufferPool) -> bool:
    gc.collect()  # JAX lets go of what a computation has read when Python collects.
    return pool.num_lent == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 64, 65, MIB, 3 * MIB + 5])
def test_loans_are_aligned_and_writable(num_bytes: int) -> None:
    memory = BufferPool().lend(num_bytes)
    assert memory.size == num_bytes and memory.dtype == np.uint8
    assert where(memory) % 64 == 0
    memory[:] = 7
    assert (memory == 7).all()


def test_memory_is_used_again_once_it_is_let_go_of() -> None:
    pool = BufferPool()
    first = pool.lend(MIB)
    place = where(first)
    assert where(pool.lend(MIB)) != place
    view = first[100:200]
    del first
    assert pool.num_lent == 1
    assert where(pool.lend(MIB)) != place  # The view is still there.
    del view
    assert pool.num_lent == 0
    assert where(pool.lend(MIB - 100)) == place


def test_much_smaller_loans_do_not_take_large_blocks() -> None:
    pool = BufferPool()
    pool.lend(8 * MIB)
    assert pool.idle_bytes == 8 * MIB
    small = pool.lend(MIB)
    assert pool.idle_bytes == 8 * MIB
    del small
    assert pool.idle_bytes == 9 * MIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16"])
def test_arrays_and_running_computations_hold_their_memory(dtype: str) -> None:
    pool = BufferPool()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    memory = pool.lend(8 * MIB)
    memory[:] = 0
    place = where(memory)
    host = memory.view(jnp.dtype(dtype)).reshape(-1, 1024)
    array = jax.device_put(host, sharding)
    assert array.unsafe_buffer_pointer() == place
    del memory, host
    assert not is_back(pool)
    view = np.asarray(array)

    def slow(x: jax.Array) -> jax.Array:
        step = jax.jit(lambda y: (y + x).astype(x.dtype))
        return jax.lax.fori_loop(0, 300, lambda _, y: step(y), x).sum()

    compiled = jax.jit(slow).lower(array).compile()
    running = compiled(array)
    del array
    assert not is_back(pool)
    del view
    # Either it still runs and holds the memory, or it has ended.
    if not is_back(pool):
        running.block_until_ready()
    wait_until(lambda: is_back(pool))
    assert float(running) == 0


def test_memory_of_dead_arrays_is_used_again_at_once() -> None:
    """Though JAX holds on to it until Python collects, which may take long."""
    pool = BufferPool()
    places = set()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            memory = pool.lend(8 * MIB)
            places.add(where(memory))
            array = jax.device_put(memory, jax.devices()[0])
            assert array.unsafe_buffer_pointer() == where(memory)
            del memory, array
    finally:
        gc.enable()
    assert len(places) <= 2


def test_other_threads_may_let_go() -> None:
    pool = BufferPool()
    held = [pool.lend(MIB) for _ in range(8)]
    threads = [threading.Thread(target=held.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.num_lent == 0 and pool.idle_bytes == 8 * MIB


def test_idle_memory_is_bounded_and_freed_in_time() -> None:
    pool = BufferPool(idle_seconds=0.05, max_idle_bytes=4 * MIB)
    held = [pool.lend(MIB) for _ in range(8)]
    held.clear()
    assert pool.idle_bytes <= 4 * MIB
    wait_until(lambda: not pool._idle and pool._trimmer is None)  # Without any further call.


def test_a_closed_pool_keeps_nothing() -> None:
    pool = BufferPool()
    held = pool.lend(MIB)
    pool.lend(MIB)
    pool.close()
    assert pool.idle_bytes == 0
    held[:] = 3
    assert (held == 3).all()
    del held
    assert pool.idle_bytes == 0
    wait_until(lambda: pool._trimmer is None)
