# SPDX-License-Identifier: Apache-2.0
"""The one thread of a process that owns its ZMQ sockets.

ZMQ sockets must not be shared between threads, so every socket is created, used and closed here.
Other threads hand in work with `post` or `call`: a queue, and a socket pair that wakes the poll.
Handlers run one after another on this thread and must not block.
"""

import collections
import concurrent.futures
import heapq
import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from kvferry.control.thread_boundary import run_guarded

_LINGER_MS = 300
_MAX_SLEEP_SECONDS = 1.0
_FROZEN_SECONDS = 0.5

T = TypeVar("T")
Action = Callable[[], None]


class ControlLoopError(RuntimeError):
    """The control thread is not running."""


class Timer:
    """A callback that is due at some time; made by `ControlLoop.every` and `call_later`."""

    def __init__(self, action: Action, period_seconds: float | None):
        """Only for `ControlLoop`.

        Args:
            action: What to call.
            period_seconds: Time between calls; None calls once.
        """
        self.action = action
        self.period_seconds = period_seconds
        self.cancelled = False

    def cancel(self) -> None:
        """Prevents further calls. Loop thread only."""
        self.cancelled = True


class ControlLoop:
    """Runs handlers of sockets, timers and posted actions on one thread.

    Args:
        name: Name of the thread.
        clock: Returns the time in seconds.

    Attributes:
        clock: As given.
        awake_seconds: A clock that stands still while the whole process is stopped or starved. The
            silence of peers is measured with it: what a peer sent meanwhile is read first.
    """

    def __init__(
        self, name: str = "kv-control", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.clock = clock
        self.awake_seconds = 0.0
        self._failure: BaseException | None = None
        self._queue: collections.deque[Action] = collections.deque()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._ended = False
        self._wake_pair: tuple[socket.socket, socket.socket] | None = None
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Action] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._on_failure: list[Action] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread, or None."""
        return self._failure

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and not self._ended

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The ZMQ context, for sockets made on the loop thread.

        Raises:
            ControlLoopError: If the loop was never started.
        """
        if self._context is None:
            raise ControlLoopError(f"control loop {self.name} is not started")
        return self._context

    def start(self) -> None:
        """Starts the thread. Does nothing if it was started.

        Raises:
            ControlLoopError: If the loop has ended; make a new one.
        """
        with self._lock:
            if self._ended:
                raise ControlLoopError(f"control loop {self.name} has ended")
            if self._thread is not None:
                return
            self._context = zmq.Context()
            self._wake_pair = socket.socketpair()
            for end in self._wake_pair:
                end.setblocking(False)
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends the thread after the work posted so far, and closes its sockets. Idempotent.

        Args:
            timeout_seconds: Longest wait for the thread.

        Raises:
            TimeoutError: If the thread is still busy after that time.
        """
        self._stopping = True
        self._wake()
        with self._lock:
            thread = self._thread
            self._ended = self._ended or thread is None
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_seconds)
        if thread.is_alive():
            raise TimeoutError(f"control loop {self.name} did not end in {timeout_seconds} s")

    def post(self, action: Action) -> bool:
        """Has `action` run on the loop thread, in order of posting. Any thread; never blocks.

        Args:
            action: Must not block.

        Returns:
            False if the loop has ended, and the action will not run.
        """
        if self._ended:
            return False
        self._queue.append(action)
        self._wake()
        return True

    def call(self, action: Callable[[], T], timeout_seconds: float = 10.0) -> T:
        """Runs `action` on the loop thread and waits for its result. Not for the step thread.

        Args:
            action: Must not block.
            timeout_seconds: Longest wait.

        Returns:
            What `action` returns.

        Raises:
            ControlLoopError: If the loop has ended.
            TimeoutError: If the result does not come in time.
            BaseException: Whatever `action` raises.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            # The thread boundary of a call: whatever the action raises belongs to the caller.
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        # Before it is posted: whatever the loop leaves undone at its end, it finds here.
        self._calls.add(future)
        try:
            if threading.current_thread() is self._thread:
                run()
            elif not self.post(run):
                raise ControlLoopError(f"control loop {self.name} has ended: {self._failure}")
            return future.result(timeout_seconds)
        except concurrent.futures.TimeoutError as error:
            raise TimeoutError(
                f"control loop {self.name} did not answer in {timeout_seconds} s"
            ) from error
        finally:
            self._calls.discard(future)

    def on_failure(self, action: Action) -> None:
        """Has `action` run, on the loop thread, if the loop dies by an exception."""
        self._on_failure.append(action)

    def watch(self, readable: Any, handler: Action) -> None:
        """Calls `handler` whenever a ZMQ socket is readable. Loop thread only."""
        self._handlers[readable] = handler
        self._poller.register(readable, zmq.POLLIN)

    def unwatch(self, readable: Any) -> None:
        """Ends `watch`; unknown sockets are ignored. Loop thread only."""
        if self._handlers.pop(readable, None) is not None:
            self._poller.unregister(readable)

    def call_later(self, delay_seconds: float, action: Action) -> Timer:
        """Calls `action` once after a delay. Loop thread only."""
        return self._arm(Timer(action, None), delay_seconds)

    def every(self, period_seconds: float, action: Action) -> Timer:
        """Calls `action` every `period_seconds`. Loop thread only."""
        return self._arm(Timer(action, period_seconds), period_seconds)

    def _arm(self, timer: Timer, delay_seconds: float) -> Timer:
        heapq.heappush(self._timers, (self.clock() + delay_seconds, next(self._order), timer))
        return timer

    def _wake(self) -> None:
        if self._wake_pair is None:
            return
        try:
            self._wake_pair[0].send(b"x")
        except OSError:
            # Full (BlockingIOError): the loop is going to wake anyway. Closed: it has ended.
            pass

    def _run(self) -> None:
        self._failure = run_guarded(self._loop, f"control loop {self.name}")
        self._ended = True
        for call in [each for each in self._calls.copy() if not each.done()]:
            call.set_exception(ControlLoopError(f"control loop {self.name} has ended"))
        if self._failure is not None:
            for action in self._on_failure:
                action()
        self._handlers.clear()
        self.context.destroy(linger=_LINGER_MS)
        for end in self._wake_pair or ():
            end.close()

    def _loop(self) -> None:
        assert self._wake_pair is not None
        wake = self._wake_pair[1]
        self._poller.register(wake, zmq.POLLIN)
        before = self.clock()
        while True:
            sleep_seconds = self._sleep_seconds()
            ready = self._poller.poll(int(sleep_seconds * 1000 + 0.999))
            now = self.clock()
            self.awake_seconds += min(now - before, sleep_seconds + _FROZEN_SECONDS)
            before = now
            for readable, _ in ready:
                if readable == wake.fileno():
                    _drain(wake)
                    continue
                handler = self._handlers.get(readable)
                if handler is not None:  # An earlier handler may have closed this socket.
                    handler()
            self._run_posted()
            if self._stopping:
                return
            self._run_timers()

    def _sleep_seconds(self) -> float:
        if self._queue or self._stopping:
            return 0.0
        if not self._timers:
            return _MAX_SLEEP_SECONDS
        return min(_MAX_SLEEP_SECONDS, max(0.0, self._timers[0][0] - self.clock()))

    def _run_posted(self) -> None:
        # Only what is there now: actions that post further ones must not starve the sockets.
        for _ in range(len(self._queue)):
            self._queue.popleft()()

    def _run_timers(self) -> None:
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.cancelled:
                continue
            timer.action()
            if timer.period_seconds is not None and not timer.cancelled:
                self._arm(timer, timer.period_seconds)


def _drain(wake: socket.socket) -> None:
    try:
        while wake.recv(4096):
            pass
    except BlockingIOError:
        pass  # Empty.
