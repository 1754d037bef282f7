# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the shm engine: segments that P writes, and D's views of them.

A segment is an anonymous file (memfd) that is handed over as a file descriptor: it has no name, so
nothing is left behind however a process ends. It is sealed against shrinking, so touching it cannot
fault, and against new writable mappings, so only P writes. Fresh pages cost several times what the
copy into them does, hence segments are used again.

Why a segment is never written while an array over it lives: D makes its arrays from an object of
its own, the window; whatever refers to the memory (the array, numpy views of it, a computation that
still reads it) refers to the window, because that is where the address came from; and only the
window's finalizer tells P that the segment is free. If D cannot tell, because it died, closed the
engine, or the connection broke, then P never writes that segment again but drops it: the kernel
frees the pages with the last mapping. So what a broken peer costs is a warm segment, never data.
"""

import dataclasses
import errno
import fcntl
import itertools
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable

import numpy as np

from kvferry.control.engines.frames import Bytes, FrameError
from kvferry.control.engines.windows import open_window

_GRAIN_BYTES = 64 << 10
_MAX_SLACK = 4
# Each takes two file descriptors of the publishing process and one of a pulling one.
_MAX_SEGMENTS = 256
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module of Python 3.11 does not name it.


@dataclasses.dataclass(eq=False)
class Segment:
    """A piece of shared memory, and who may still read it.

    Attributes:
        number: Names it; never used again.
        num_bytes: Its size.
        fd: Its file, once it is open.
        memory: 1-D, uint8, writable, once it is open.
        published: Whether a publication of this process has it.
        leaving: Whether that publication has ended, and only work under way still needs it.
        lent: Whether a puller may have arrays over it.
        dropped: Whether it will never be used again.
        free_since: When it became free, in seconds of the monotonic clock.
    """

    number: int
    num_bytes: int
    fd: int = -1
    memory: Bytes | None = None
    published: bool = True
    leaving: bool = False
    lent: bool = False
    dropped: bool = False
    free_since: float = 0.0

    def open(self) -> Bytes:
        """Takes the memory from the system, if that was not done before.

        Returns:
            `memory`.

        Raises:
            OSError: If there is not enough.
        """
        if self.memory is None:
            _check_available(self.num_bytes)
            self.fd = os.memfd_create("kvferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                # Now, and not by a fault in the middle of a copy.
                os.posix_fallocate(self.fd, 0, self.num_bytes)
                memory = np.frombuffer(mmap.mmap(self.fd, self.num_bytes), np.uint8)
                fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fixed | fcntl.F_SEAL_SEAL)
            except OSError:
                self.close()
                raise
            self.memory = memory
        return self.memory

    def close(self) -> None:
        """Lets go of the memory on this side."""
        self.memory = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) << 10


def _check_available(num_bytes: int) -> None:
    # The kernel would rather kill some process than refuse shared memory that it does not have.
    available = _available_bytes()
    if num_bytes > available:
        raise OSError(errno.ENOMEM, f"{num_bytes} bytes of {available} that are available")


class SegmentPool:
    """The segments of a process, within a limit. Thread-safe.

    What a puller holds on to after its publication has ended counts only as long as the room is not
    needed: then it is dropped on this side and is the puller's alone.

    Args:
        capacity_bytes: What may be published at a time; one publication is always let through.
        on_drop: Called with each segment that is dropped; it closes it, some time soon.
    """

    def __init__(self, capacity_bytes: int, on_drop: Callable[[Segment], None]) -> None:
        self._capacity = capacity_bytes
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._segments: dict[int, Segment] = {}

    def has_room(self, num_bytes: int) -> bool:
        """Tells whether `reserve` would succeed."""
        with self._lock:
            return self._has_room(num_bytes)

    def reserve(self, num_bytes: int) -> Segment | None:
        """Takes a segment for a publication. Does not block; see `Segment.open`.

        Args:
            num_bytes: What it must hold.

        Returns:
            The segment, or None if there is no room.
        """
        with self._lock:
            if not self._has_room(num_bytes):
                return None
            fits = [
                each
                for each in self._segments.values()
                if not (each.published or each.lent)
                and num_bytes <= each.num_bytes <= _MAX_SLACK * max(num_bytes, _GRAIN_BYTES)
            ]
            if fits:
                # The one that fits best; of equals the one whose pages are still in the cache.
                found = min(fits, key=lambda each: (each.num_bytes, -each.free_since))
                found.published = True
                return found
            size = max(1, -(-num_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES
            made = Segment(next(self._numbers), size)
            self._segments[made.number] = made
            spare = [each for each in self._segments.values() if not each.published]
            spare.sort(key=lambda each: (each.lent, each.free_since))
            for each in spare:
                if self._total() <= self._capacity and len(self._segments) <= _MAX_SEGMENTS:
                    break
                self._drop(each)
            return made

    def lend(self, segment: Segment) -> None:
        """Notes that a puller gets it."""
        with self._lock:
            segment.lent = True

    def give_back(self, segment: Segment) -> None:
        """Notes that the puller has let go of it."""
        with self._lock:
            segment.lent = False
            segment.free_since = time.monotonic()

    def leave(self, segment: Segment) -> None:
        """Notes that its publication has ended, which makes room at once; `unpublish` follows."""
        with self._lock:
            segment.leaving = True

    def unpublish(self, segment: Segment) -> None:
        """Notes that nothing here uses it for a publication any more."""
        with self._lock:
            segment.published = segment.leaving = False
            segment.free_since = time.monotonic()

    def lose(self, segment: Segment) -> None:
        """Drops a segment because nobody will tell when its puller has let go of it."""
        with self._lock:
            self._drop(segment)

    def trim(self, idle_seconds: float) -> None:
        """Drops what has not been used for a while."""
        limit = time.monotonic() - idle_seconds
        with self._lock:
            for each in list(self._segments.values()):
                if not (each.published or each.lent) and each.free_since < limit:
                    self._drop(each)

    def close(self) -> None:
        """Drops everything."""
        with self._lock:
            for each in list(self._segments.values()):
                self._drop(each)

    def counters(self) -> dict[str, int]:
        """Returns how many segments there are, how many are lent, and their bytes."""
        with self._lock:
            return {
                "segments": len(self._segments),
                "segments_lent": sum(each.lent for each in self._segments.values()),
                "segment_bytes": self._total(),
            }

    def _total(self) -> int:
        return sum(each.num_bytes for each in self._segments.values())

    def _has_room(self, num_bytes: int) -> bool:
        busy = [
            each.num_bytes
            for each in self._segments.values()
            if each.published and not each.leaving
        ]
        fits = sum(busy) + num_bytes <= self._capacity and len(busy) < _MAX_SEGMENTS
        return fits or not busy

    def _drop(self, segment: Segment) -> None:
        if not segment.dropped:
            segment.dropped = True
            self._segments.pop(segment.number, None)
            self._on_drop(segment)


class Mapping:
    """A peer's segment in the memory of this process, to be read.

    Args:
        fd: The segment's file; closed.

    Raises:
        FrameError: If it is not sealed memory: the peer could make this process fault.
        OSError: If it cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size < 1:
                raise FrameError("the peer has sent a file that is no memory")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise FrameError("the peer has sent memory that is not sealed against shrinking")
            self._memory = np.frombuffer(
                mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ), np.uint8
            )
        finally:
            os.close(fd)

    def window(self, num_bytes: int, on_free: Callable[[], object]) -> Bytes:
        """Opens the beginning of the segment.

        Args:
            num_bytes: How much of it.
            on_free: See `open_window`.

        Returns:
            The bytes, 1-D, uint8, read-only.

        Raises:
            FrameError: If the segment is shorter.
        """
        if num_bytes > self._memory.size:
            raise FrameError(f"the peer has sent {self._memory.size} of {num_bytes} bytes")
        return open_window(self._memory, num_bytes, on_free)
