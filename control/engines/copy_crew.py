# SPDX-License-Identifier: Apache-2.0
"""Copies memory with several threads: one alone does not reach what the memory can do."""

import collections
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvferry.control.workers import WorkerPool

_MOST_HELPERS = 3
_MAX_QUEUED = 1024

Copy: TypeAlias = Callable[[], None]


class CopyCrew:
    """Threads that help whoever has much to copy.

    Args:
        num_helpers: How many; by default as many as the machine has processors to spare, 3 at most.
    """

    def __init__(self, num_helpers: int | None = None) -> None:
        if num_helpers is None:
            num_helpers = min(_MOST_HELPERS, (os.cpu_count() or 1) - 1)
        self._num_helpers = num_helpers
        self._pool = WorkerPool("kv-copy", max(1, num_helpers), _MAX_QUEUED)

    def start(self) -> None:
        """Starts the threads."""
        if self._num_helpers:
            self._pool.start()

    def stop(self) -> None:
        """Ends the threads. Idempotent."""
        self._pool.stop()

    def run(self, copies: Sequence[Copy]) -> None:
        """Makes copies, together with the helpers that have time; returns when all are made.

        Args:
            copies: Each makes one, in any order and on any thread.

        Raises:
            OSError: If one failed on a helper.
        """
        todo = collections.deque(copies)
        changed = threading.Condition()
        working = made = 0

        def work() -> None:
            nonlocal working, made
            # Counted before anything is taken: once `todo` is empty and nobody works, all is done,
            # also if a helper only comes then.
            with changed:
                working += 1
            count = 0
            try:
                while True:
                    try:
                        copy = todo.popleft()
                    except IndexError:
                        break
                    copy()
                    count += 1
            finally:
                with changed:
                    working -= 1
                    made += count
                    changed.notify_all()

        for _ in range(min(self._num_helpers, len(todo) - 1)):
            self._pool.submit(work, lambda error: None)
        try:
            work()
        finally:
            # Nobody may write after this returns, whatever happened.
            todo.clear()
            with changed:
                changed.wait_for(lambda: not working)
        if made != len(copies):
            raise OSError(f"{made} of {len(copies)} copies were made; the log tells why")
