# SPDX-License-Identifier: Apache-2.0
"""A thread that takes turns while there is work and sleeps when there is none.

`StepLoop` knows nothing of requests: it owns the thread, the inbox through which other threads
hand it work, the way to sleep and be woken, draining, and what happens when a turn raises.
"""

import abc
import threading
import time
from collections import deque
from collections.abc import Callable

from absl import logging

from kvferry.engine.boundary import guarded

_JOIN_GRACE_SECONDS = 30.0
"""How long `stop` waits for the turn in progress (one step) after the drain is over."""


class LoopStoppedError(RuntimeError):
    """The loop takes no more work: it is draining, stopped, or failed."""


class StepLoop(abc.ABC):
    """Life cycle of the step thread."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes a loop that is not running yet.

        Args:
            name: name of the thread.
            clock: seconds that never go backwards.
        """
        self.now = clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = False
        self._started = False
        self._closed = False
        self._drain_deadline: float | None = None
        self._failure: Exception | None = None

    @abc.abstractmethod
    def turn(self) -> float | None:
        """Does one piece of work. Step thread only.

        Returns:
            Seconds to sleep at most until the next turn: 0 when there is more to do, None when
            only a wake-up can bring more.
        """

    @abc.abstractmethod
    def has_pending(self) -> bool:
        """Returns whether work is in flight that a drain must wait for. Step thread only."""

    @abc.abstractmethod
    def wind_down(self, failure: Exception | None) -> None:
        """Ends whatever is left, at the end of the thread. Step thread only.

        Args:
            failure: what ended the loop; None after an orderly stop.
        """

    @property
    def failure(self) -> Exception | None:
        """The exception that ended the loop, or None."""
        return self._failure

    @property
    def healthy(self) -> bool:
        """Whether the loop runs and takes work."""
        return self._thread.is_alive() and self._failure is None and not self._refusing

    def start(self) -> None:
        """Starts the thread; a second call does nothing.

        Raises:
            LoopStoppedError: it was stopped before.
        """
        with self._condition:
            if self._closed:
                raise LoopStoppedError("the loop was stopped and cannot start again")
            if self._started:
                return
            self._started = True
        self._thread.start()

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuses new work, waits for what is pending, then ends the thread. Idempotent.

        Args:
            drain_seconds: how long pending work may take to end by itself.

        Raises:
            TimeoutError: the turn in progress did not end.
        """
        with self._condition:
            if self._drain_deadline is None:
                self._drain_deadline = self.now() + drain_seconds
            started = self._started
            self._woken = True
            self._condition.notify_all()
        if not started:
            self._close(None)
            return
        self._thread.join(drain_seconds + _JOIN_GRACE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(
                f"thread {self._thread.name} is still in a turn {_JOIN_GRACE_SECONDS:.0f} s after "
                f"the drain of {drain_seconds} s ended"
            )

    def wake(self) -> None:
        """Makes the loop take a turn soon; from any thread."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Runs something on the step thread, before its next turn; from any thread.

        What is handed in from one thread runs in that order. Nothing happens after the end of the
        loop.

        Args:
            action: must not block; an exception ends the loop.
        """
        with self._condition:
            self._hand_in(action)

    @property
    def closed(self) -> bool:
        """Whether the loop is over and only gives what is left its end."""
        return self._closed

    @property
    def _refusing(self) -> bool:
        return self._closed or self._drain_deadline is not None

    def _hand_in(self, action: Callable[[], None]) -> None:
        """Like `call_soon`; the caller holds the condition."""
        if not self._closed:
            self._inbox.append(action)
            self._condition.notify_all()

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _run(self) -> None:
        _, self._failure = guarded(self._loop, f"thread {self._thread.name}")
        self._close(self._failure)

    def _loop(self) -> None:
        while True:
            delay = self.turn()
            deadline = self._drain_deadline
            if deadline is not None:
                left = deadline - self.now()
                if left <= 0 or not (self._inbox or self.has_pending()):
                    return
                delay = left if delay is None else min(delay, left)
            if delay is None or delay > 0:
                self._sleep(delay)

    def _sleep(self, delay: float | None) -> None:
        with self._condition:
            if not self._woken and not self._inbox:
                self._condition.wait(delay)
            self._woken = False

    def _close(self, failure: Exception | None) -> None:
        with self._condition:
            if self._closed:
                return
            self._closed = True
        # Whoever got something into the inbox before this point gets an answer.
        while self._inbox:
            guarded(self._inbox.popleft(), "the last work handed in")
        guarded(lambda: self.wind_down(failure), "winding down")
        logging.info("thread %s ended%s", self._thread.name, " with an error" if failure else "")
