# SPDX-License-Identifier: Apache-2.0
"""Shared memory: who may use a segment, when it is used again, what a peer cannot do with it."""

import fcntl
import gc
import mmap
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines import shm_segments
from kvferry.control.engines.frames import FrameError
from kvferry.control.engines.shm_segments import Mapping, Segment, SegmentPool

MIB = 1 << 20


class Pool:
    """A pool and what it has dropped."""

    def __init__(self, capacity_bytes: int = 8 * MIB) -> None:
        self.dropped: list[Segment] = []
        self.pool = SegmentPool(capacity_bytes, self.dropped.append)

    def reserve(self, num_bytes: int) -> Segment:
        segment = self.pool.reserve(num_bytes)
        assert segment is not None
        return segment


def open_mapping(segment: Segment) -> Mapping:
    segment.open()
    return Mapping(os.dup(segment.fd))


def test_a_segment_is_used_again_only_when_nobody_has_it() -> None:
    pool = Pool()
    first = pool.reserve(MIB)
    pool.pool.lend(first)
    pool.pool.unpublish(first)
    second = pool.reserve(MIB)
    assert second is not first, "the puller may still read it"
    pool.pool.give_back(first)
    assert pool.reserve(MIB) is first
    pool.pool.lend(second)
    pool.pool.give_back(second)
    third = pool.reserve(MIB)
    assert third is not second, "its publication has not ended"
    pool.pool.unpublish(second)
    assert pool.reserve(MIB) is second


def test_a_lost_segment_is_never_used_again() -> None:
    pool = Pool()
    lost = pool.reserve(MIB)
    pool.pool.lend(lost)
    pool.pool.lose(lost)
    pool.pool.lose(lost)
    assert pool.dropped == [lost]
    pool.pool.unpublish(lost)
    pool.pool.give_back(lost)
    assert pool.reserve(MIB) is not lost
    assert pool.pool.counters()["segments"] == 1


def test_the_best_fit_is_taken_and_nothing_much_too_large() -> None:
    pool = Pool()
    large, small = pool.reserve(2 * MIB), pool.reserve(MIB)
    for each in (large, small):
        pool.pool.unpublish(each)
    assert pool.reserve(MIB - 5) is small
    assert pool.reserve(MIB - 5) is large
    pool.pool.unpublish(large)
    assert pool.reserve(1) is not large


def test_room_is_what_is_published_and_one_is_always_let_through() -> None:
    pool = Pool(4 * MIB)
    huge = pool.reserve(16 * MIB)
    assert not pool.pool.has_room(1) and pool.pool.reserve(1) is None
    pool.pool.unpublish(huge)
    assert pool.pool.has_room(3 * MIB)
    one = pool.reserve(3 * MIB)
    assert pool.dropped == [huge], "what is free makes room"
    assert pool.pool.has_room(MIB) and not pool.pool.has_room(MIB + 1)
    # What a puller holds on to after the release is its own when the room is needed.
    pool.pool.lend(one)
    pool.pool.unpublish(one)
    assert pool.pool.has_room(4 * MIB)
    pool.reserve(4 * MIB)
    assert pool.dropped == [huge, one] and pool.pool.counters()["segments_lent"] == 0
    pool.pool.give_back(one)
    assert pool.pool.counters()["segments"] == 1


def test_a_release_makes_room_before_the_segment_can_be_used_again() -> None:
    pool = Pool(MIB)
    first = pool.reserve(MIB)
    assert not pool.pool.has_room(1)
    pool.pool.leave(first)
    second = pool.reserve(MIB)
    assert second is not first and not pool.pool.has_room(1)
    pool.pool.unpublish(first)
    pool.pool.leave(second)
    assert pool.reserve(MIB) is first


def test_their_number_is_bounded() -> None:
    pool = Pool(1 << 40)
    taken = [pool.reserve(1) for _ in range(256)]
    assert not pool.pool.has_room(1) and pool.pool.reserve(1) is None
    pool.pool.unpublish(taken[0])
    assert pool.pool.has_room(MIB)
    pool.reserve(MIB)
    assert pool.dropped == taken[:1] and pool.pool.counters()["segments"] == 256


def test_idle_segments_are_dropped() -> None:
    pool = Pool()
    idle, lent, published = (pool.reserve(MIB) for _ in range(3))
    pool.pool.unpublish(idle)
    pool.pool.lend(lent)
    pool.pool.unpublish(lent)
    pool.pool.trim(60.0)
    assert pool.dropped == []
    pool.pool.trim(0.0)
    assert pool.dropped == [idle]
    pool.pool.close()
    assert set(pool.dropped) == {idle, lent, published}


def test_memory_is_free_when_no_array_view_or_computation_refers_to_it() -> None:
    segment = Segment(0, MIB)
    freed: list[int] = []
    memory = segment.open()
    memory[:4096] = np.arange(4096) % 251
    mapping = open_mapping(segment)

    def is_free() -> bool:
        gc.collect()
        return bool(freed)

    window = mapping.window(4096, lambda: freed.append(1))
    array = jax.device_put(window.view(jnp.bfloat16).reshape(32, 64))
    assert array.unsafe_buffer_pointer() == window.ctypes.data, "a copy was made"
    del window
    assert not is_free()
    view = np.asarray(array)[3:]
    del array
    assert not is_free() and view.view(np.uint8).reshape(-1)[0] == 3 * 128 % 251
    del view
    assert is_free()

    freed.clear()
    array = jax.device_put(mapping.window(4096, lambda: freed.append(1)).view(np.float32))
    result = jax.jit(lambda x: x * 0 + 1, donate_argnums=0)(array)
    del array
    assert float(result.sum()) == 1024
    assert is_free() and memory[5] == 5


def test_only_the_owner_writes() -> None:
    segment = Segment(0, MIB)
    memory = segment.open()
    mapping = open_mapping(segment)
    window = mapping.window(8, lambda: None)
    memory[:8] = 7
    assert window.tolist() == [7] * 8
    with pytest.raises(ValueError, match="read-only"):
        window[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    segment.close()
    assert window.tolist() == [7] * 8, "the memory lives as long as the window"


def test_memory_that_could_make_us_fault_is_refused() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(FrameError, match="not sealed against shrinking"):
        Mapping(fd)
    with tempfile.TemporaryFile() as file:
        file.truncate(MIB)
        with pytest.raises(OSError):
            Mapping(os.dup(file.fileno()))
    ends = os.pipe()
    for end in ends:
        with pytest.raises(FrameError, match="no memory"):
            Mapping(end)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(FrameError, match="no memory"):
        Mapping(empty)
    segment = Segment(0, 4096)
    with pytest.raises(FrameError, match="4096 of 4097 bytes"):
        open_mapping(segment).window(4097, lambda: None)


def test_no_memory_is_an_error_and_not_the_death_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm_segments, "_available_bytes", lambda: MIB)
    segment = Segment(0, 2 * MIB)
    with pytest.raises(OSError, match="2097152 bytes of 1048576 that are available"):
        segment.open()
    assert segment.fd == -1
    monkeypatch.undo()
    assert segment.open().size == 2 * MIB
