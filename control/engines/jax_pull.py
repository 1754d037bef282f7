# SPDX-License-Identifier: Apache-2.0
"""One pull over `jax.experimental.transfer`, with a deadline of its own and a safe way out."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from kvferry.control.engines.base import Pull, TransferError, TransferTimeoutError
from kvferry.control.engines.host_arrays import sizes_of
from kvferry.control.engines.jax_watch import ReceiveWatch, is_ready
from kvferry.control.engines.spare_threads import SpareThreads

_POISON_BYTES = 64 << 10


class Connection:
    """A connection of the library to one peer. Guarded by nothing: all its state only grows.

    Args:
        raw: What `connect` of the library returned.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._asked_bytes = 0
        self._delivered = False

    def pull(self, key: int, specs: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Starts a pull; the arrays are ready later.

        Args:
            key: What to pull.
            specs: What was published, with shardings.

        Returns:
            The arrays.
        """
        if self._asked_bytes <= _POISON_BYTES:  # More need not be counted.
            self._asked_bytes += sum(sizes_of(specs))
        return list(self._raw.pull(key, specs))

    def note_delivery(self) -> None:
        """Says that something has arrived, or that a pull has ended."""
        self._delivered = True

    def poison_if_safe(self) -> bool:
        """Ends all its pulls with an error, if no bytes can be under way.

        Otherwise buffers of the library would be lost. Nothing is known to be under way on a
        connection that has never delivered anything, if all that was asked of it is so small that
        it would have come in one piece: that of a peer which cannot be reached or does not answer.

        Returns:
            Whether it was done.
        """
        if self._delivered or self._asked_bytes > _POISON_BYTES:
            return False
        self.poison()
        return True

    def poison(self) -> None:
        """Ends all its pulls with an error, and may lose receive buffers."""
        self._raw._poison_connection()


class JaxPull(Pull):
    """A pull in progress.

    Args:
        connection: The connection that it uses.
        threads: One of them waits in the arrays, which nothing could end. To look at them again and
            again instead takes a fifth of the time of a small pull.
        watch: Told of what arrives, fails, or is given up.
        label: Names it in errors.
        arrays: What was asked for, without those in `empty`.
        empty: Arrays without elements, by position. The library never delivers those.
        deadline_seconds: Time from now after which it fails.
        disconnect: Has the next pull use a new connection.
    """

    def __init__(
        self,
        connection: Connection,
        threads: SpareThreads,
        watch: ReceiveWatch,
        label: str,
        arrays: list[jax.Array],
        empty: dict[int, jax.Array],
        deadline_seconds: float,
        disconnect: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._watch = watch
        self._label = label
        self._arrays = arrays
        self._empty = empty
        self._seconds = deadline_seconds
        self._disconnect = disconnect
        self._until = time.monotonic() + deadline_seconds
        self._num_arrived = 0
        self._error: TransferError | None = None
        self._problem = ""
        self._arrived = False
        # Held until all has arrived; an Event would be three objects and some microseconds.
        self._gate = threading.Lock()
        self._gate.acquire()
        threads.run(self._wait_in_arrays)

    def wait(self, timeout_seconds: float) -> bool:
        """See `Pull.wait`."""
        left = max(0.0, min(timeout_seconds, self._until - time.monotonic()))
        if not self._ended() and self._gate.acquire(timeout=left):
            self._gate.release()
        if not self._ended() and time.monotonic() >= self._until:
            done = f"{self.progress} of {len(self._arrays)} arrays had arrived"
            self._give_up(
                TransferTimeoutError(f"{self._label}: not done in {self._seconds:.1f} s, {done}")
            )
        return self._ended()

    @property
    def progress(self) -> int:
        """Arrays that have arrived; the library shows no less."""
        arrays = self._arrays
        while self._num_arrived < len(arrays) and is_ready(arrays[self._num_arrived]):
            self._num_arrived += 1
            self._connection.note_delivery()
        return self._num_arrived

    def result(self) -> list[jax.Array]:
        """See `Pull.result`."""
        if self._error is not None:
            raise self._error
        if not self._ended():
            raise TransferError(f"{self._label}: has not ended")
        if self._problem:
            self._disconnect()
            self._watch.suspect()
            self._error = TransferError(f"{self._label}: {self._problem}")
            raise self._error
        self._watch.arrived()
        if not self._empty:
            return self._arrays
        arrived = iter(self._arrays)
        count = len(self._arrays) + len(self._empty)
        return [self._empty[i] if i in self._empty else next(arrived) for i in range(count)]

    def cancel(self) -> None:
        """See `Pull.cancel`."""
        if not self._ended():
            self._give_up(TransferError(f"{self._label}: cancelled"))

    def _ended(self) -> bool:
        return self._arrived or self._error is not None

    def _wait_in_arrays(self) -> None:
        arrays = self._arrays
        try:
            # In one call: woken for each, it would take the processor from what brings them.
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError as error:
            self._problem = str(error)
            for array in arrays:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    array.block_until_ready()
        self._connection.note_delivery()
        self._arrived = True
        self._gate.release()

    def _give_up(self, error: TransferError) -> None:
        self._error = error
        self._disconnect()
        if not self._connection.poison_if_safe():
            # Left to drain: cancelled with bytes under way, it would keep receive buffers.
            self._watch.drain(self._arrays, self._connection)
        self._watch.suspect()
        self._arrays = []
