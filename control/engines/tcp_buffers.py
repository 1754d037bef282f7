# SPDX-License-Identifier: Apache-2.0
"""Memory into which the tcp engine receives, used again and again.

Fresh memory costs a page fault per 4 KiB, a third of the speed of a transfer on loopback. Each loan
is a window (windows.py), so memory comes back when no array, view or computation refers to it.
"""

import collections
import dataclasses
import functools
import gc
import mmap
import threading
import time

import numpy as np

from kvferry.control.engines.frames import Bytes
from kvferry.control.engines.windows import open_window

_GRAIN_BYTES = 64 << 10
_MAX_SLACK = 2
_TRIM_SECONDS = 5.0
_WORTH_COLLECTING_BYTES = 1 << 20


@dataclasses.dataclass(eq=False)
class _Block:
    memory: Bytes
    free_since: float = 0.0


class BufferPool:
    """Lends memory. Thread-safe.

    Args:
        idle_seconds: How long memory that nobody uses is kept.
        max_idle_bytes: How much of it.
    """

    def __init__(self, idle_seconds: float = 20.0, max_idle_bytes: int = 1 << 30) -> None:
        self._idle_seconds = idle_seconds
        self._max_idle_bytes = max_idle_bytes
        self._changed = threading.Condition()
        self._idle: list[_Block] = []
        # Filled by finalizers, which run in the middle of anything and must not take a lock.
        self._returned: collections.deque[_Block] = collections.deque()
        self._num_lent = 0
        self._closed = False
        self._trimmer: threading.Thread | None = None

    @property
    def idle_bytes(self) -> int:
        """Memory that is kept but not used."""
        with self._changed:
            self._collect()
            return sum(each.memory.size for each in self._idle)

    @property
    def num_lent(self) -> int:
        """Loans to which something still refers."""
        with self._changed:
            self._collect()
            return self._num_lent

    def lend(self, num_bytes: int) -> Bytes:
        """Lends memory until nothing refers to it.

        Args:
            num_bytes: How much.

        Returns:
            1-D, uint8, at a multiple of 64 bytes; holds anything.
        """
        with self._changed:
            self._collect()
            most = _MAX_SLACK * max(num_bytes, _GRAIN_BYTES)
            fits = [each for each in self._idle if num_bytes <= each.memory.size <= most]
            if not fits and self._num_lent and num_bytes >= _WORTH_COLLECTING_BYTES:
                # JAX lets go of the memory of a dead array only when Python collects.
                gc.collect(0)
                self._collect()
                fits = [each for each in self._idle if num_bytes <= each.memory.size <= most]
            if fits:
                # Of equals the one whose pages are still in the cache.
                block = min(reversed(fits), key=lambda each: each.memory.size)
                self._idle.remove(block)
            else:
                block = _Block(_fresh(-(-max(num_bytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES))
            self._num_lent += 1
            self._trim_later()
        give_back = functools.partial(self._returned.append, block)
        return open_window(block.memory, num_bytes, give_back)

    def close(self) -> None:
        """Frees what is idle, and what comes back when it does."""
        with self._changed:
            self._closed = True
            self._idle.clear()
            self._changed.notify_all()

    def _collect(self) -> None:
        now = time.monotonic()
        while self._returned:
            block = self._returned.popleft()
            self._num_lent -= 1
            block.free_since = now
            self._idle.append(block)
        limit = 0.0 if self._closed else self._max_idle_bytes
        self._idle = [each for each in self._idle if now - each.free_since < self._idle_seconds]
        total = sum(each.memory.size for each in self._idle)
        while self._idle and total > limit:
            total -= self._idle.pop(0).memory.size

    def _trim_later(self) -> None:
        if self._trimmer is None and not self._closed:
            self._trimmer = threading.Thread(target=self._trim, name="kv-tcp-trim", daemon=True)
            self._trimmer.start()

    def _trim(self) -> None:
        # Ends by itself, so that an idle process sleeps.
        with self._changed:
            while not self._closed and (self._num_lent or self._idle or self._returned):
                self._changed.wait(min(_TRIM_SECONDS, self._idle_seconds))
                if self._num_lent:
                    gc.collect(0)
                self._collect()
            self._trimmer = None


def _fresh(size: int) -> Bytes:
    # Not np.empty: numpy asks for huge pages, and to find one can take the kernel longer than to
    # receive what goes there. A mapping begins at a page, so it is aligned.
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)
