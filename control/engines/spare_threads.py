# SPDX-License-Identifier: Apache-2.0
"""Threads for waits that nothing can end: as many as needed, because some may never come back."""

import queue
import threading
import time
from collections.abc import Callable

from kvferry.control.thread_boundary import run_guarded

_MAX_IDLE = 32


class SpareThreads:
    """Runs each job at once, on a thread that is idle or else on a new one.

    A job that never returns costs its thread and nothing more; the threads are daemons.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, job: Callable[[], None]) -> None:
        """Has a thread run a job, which handles its errors. Any thread; does not block."""
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.add(thread)
                thread.start()
        self._jobs.put(job)

    def close(self, timeout_seconds: float) -> None:
        """Ends the threads, each when its job does.

        Args:
            timeout_seconds: Longest wait for all of them.
        """
        with self._lock:
            self._closed = True
            for _ in range(self._num_idle):
                self._jobs.put(None)
            self._num_idle = 0
            threads = list(self._threads)
        until = time.monotonic() + timeout_seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _serve(self) -> None:
        while self._serve_one():
            pass
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _serve_one(self) -> bool:
        # A function of its own, or an idle thread would keep its last job and all that refers to.
        job = self._jobs.get()
        if job is None:
            return False
        run_guarded(job, f"a job of {self._name}")
        with self._lock:
            if self._closed or self._num_idle >= _MAX_IDLE:
                return False
            self._num_idle += 1
            return True
