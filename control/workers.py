# SPDX-License-Identifier: Apache-2.0
"""A bounded pool of named daemon threads for what may block: pulls and name look-ups."""

import queue
import threading
from collections.abc import Callable

from kvferry.control.thread_boundary import run_guarded

Job = Callable[[], None]
OnError = Callable[[BaseException], None]


class WorkerPool:
    """Threads that run jobs from one bounded queue.

    Daemon threads, because a name look-up may hang for longer than a process should take to end.

    Args:
        name: Prefix of the threads' names.
        size: Number of threads, at least 1.
        max_queued: Jobs that may wait; more are refused.
    """

    def __init__(self, name: str, size: int, max_queued: int) -> None:
        if size < 1:
            raise ValueError(f"WorkerPool {name} needs at least one thread, got {size}")
        self._name = name
        self._size = size
        self._queue: queue.Queue[tuple[Job, OnError] | None] = queue.Queue(max_queued + size)
        self._lock = threading.Lock()
        self._pending = 0
        self._finished = 0
        self._threads: list[threading.Thread] = []
        self._stopped = False

    @property
    def pending(self) -> int:
        """Jobs that wait or run."""
        return self._pending

    @property
    def finished(self) -> int:
        """Jobs that have ended; as long as it grows, those that wait move up."""
        return self._finished

    def start(self) -> None:
        """Starts the threads. Idempotent."""
        with self._lock:
            if self._threads or self._stopped:
                return
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{index}", daemon=True)
                for index in range(self._size)
            ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, on_error: OnError) -> bool:
        """Queues a job. Any thread; never blocks.

        Args:
            job: What to run. It handles the errors that it expects.
            on_error: Called on the worker with whatever else it raises.

        Returns:
            False if too many jobs wait, or the pool is stopped.
        """
        with self._lock:
            if self._stopped:
                return False
            try:
                self._queue.put_nowait((job, on_error))
            except queue.Full:
                return False
            self._pending += 1
            return True

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Drops the jobs that wait and ends the threads. Idempotent.

        Args:
            timeout_seconds: Longest wait for each thread; one that hangs is left behind.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            while not self._queue.empty():
                self._queue.get_nowait()
                self._pending -= 1
            for _ in self._threads:
                self._queue.put_nowait(None)
        for thread in self._threads:
            thread.join(timeout_seconds)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A function of its own: in a loop its variables would hold the last job, and whatever
        # arrays that refers to, for as long as the thread has nothing else to do.
        item = self._queue.get()
        if item is None:
            return False
        job, on_error = item
        error = run_guarded(job, f"a job of {threading.current_thread().name}")
        if error is not None:
            on_error(error)
        with self._lock:
            self._pending -= 1
            self._finished += 1
        return True
