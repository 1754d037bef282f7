# SPDX-License-Identifier: Apache-2.0
"""A pull into host memory, which any thread may complete or end."""

import threading
import time
from collections.abc import Callable, Sequence

import jax

from kvferry.control.engines.base import Pull, Spec, TransferError, TransferTimeoutError
from kvferry.control.engines.frames import Bytes
from kvferry.control.engines.host_arrays import arrays_in


class PendingPull(Pull):
    """A pull that waits for `complete` or `fail`.

    Args:
        source: The peer's address, and the id.
        specs: The arrays.
        seconds: Time until it fails.
        on_end: Called once when it has failed, by whatever thread that happens on; or None.

    Attributes:
        address: Of the peer.
        key: The id.
        specs: As given.
        number: For the engine, to tell its pulls apart; -1 until it has one.
        received: Bytes that have arrived.
    """

    def __init__(
        self,
        source: tuple[str, int],
        specs: Sequence[Spec],
        seconds: float,
        on_end: Callable[["PendingPull"], None] | None = None,
    ) -> None:
        self.address, self.key = source
        self.specs = list(specs)
        self.number = -1
        self.received = 0
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._on_end = on_end
        self._changed = threading.Condition()
        self._memory: Bytes | None = None
        self._error: TransferError | None = None

    @property
    def ended(self) -> bool:
        """Whether it has been completed or has failed."""
        return self._error is not None or self._memory is not None

    @property
    def progress(self) -> int:
        """Bytes that have arrived."""
        return self.received

    def wait(self, timeout_seconds: float) -> bool:
        """See `Pull.wait`."""
        until = min(time.monotonic() + timeout_seconds, self._until)
        with self._changed:
            while not self.ended and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        if not self.ended and time.monotonic() >= self._until:
            text = f"not done in {self._seconds:.1f} s, {self.received} bytes had arrived"
            self._end(TransferTimeoutError(f"{self._label}: {text}"))
        return self.ended

    def result(self) -> list[jax.Array]:
        """See `Pull.result`."""
        with self._changed:
            error, memory = self._error, self._memory
        if error is not None:
            raise error
        if memory is None:
            raise TransferError(f"{self._label}: has not ended")
        return self._arrays(memory)

    def cancel(self) -> None:
        """See `Pull.cancel`."""
        self.fail("cancelled")

    def fail(self, problem: str) -> None:
        """Ends it with an error. Any thread; ignored if it has ended."""
        self._end(TransferError(f"{self._label}: {problem}"))

    def complete(self, memory: Bytes) -> None:
        """Ends it well. Any thread; ignored if it has ended.

        Args:
            memory: What has arrived, see `arrays_in`.
        """
        with self._changed:
            if not self.ended:
                self._memory = memory
                self._changed.notify_all()

    def _end(self, error: TransferError) -> None:
        with self._changed:
            if self.ended:
                return
            self._error = error
            self._changed.notify_all()
        if self._on_end is not None:
            self._on_end(self)

    def _arrays(self, memory: Bytes) -> list[jax.Array]:
        # Of the thread that asks for the result.
        return arrays_in(memory, self.specs)

    @property
    def _label(self) -> str:
        return f"pull {self.key} from {self.address}"
