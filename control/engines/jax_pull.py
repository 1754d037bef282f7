# SPDX-License-Identifier: Apache-2.0
"""One pull over `jax.experimental.transfer`, with a deadline of its own and a safe way out."""

import time
from collections.abc import Callable
from typing import Any

import jax

from kvferry.control.engines.base import Pull, TransferError, TransferTimeoutError
from kvferry.control.engines.jax_watch import ReceiveWatch, is_ready

_PAUSE_SHARE = 0.05
_PAUSES = (100e-6, 0.002)
_POISON_BYTES = 64 << 10


class Connection:
    """A connection of the library to one peer. Guarded by nothing: all its state only grows.

    Args:
        raw: What `connect` of the library returned.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._asked_bytes = 0
        self.delivered = False

    def pull(self, key: int, specs: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Starts a pull; the arrays are ready later.

        Args:
            key: What to pull.
            specs: What was published, with shardings.

        Returns:
            The arrays.
        """
        self._asked_bytes += sum(spec.size * spec.dtype.itemsize for spec in specs)
        return list(self._raw.pull(key, specs))

    def poison_if_safe(self) -> bool:
        """Ends all its pulls with an error, if no bytes can be under way.

        Otherwise buffers of the library would be lost. Nothing is known to be under way on a
        connection that has never delivered anything, if all that was asked of it is so small that
        it would have come in one piece: that of a peer which cannot be reached or does not answer.

        Returns:
            Whether it was done.
        """
        if self.delivered or self._asked_bytes > _POISON_BYTES:
            return False
        self._raw._poison_connection()
        return True


class JaxPull(Pull):
    """A pull in progress.

    Args:
        connection: The connection that it uses.
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
        self._since = time.monotonic()
        self._until = self._since + deadline_seconds
        self._next = 0
        self._error: TransferError | None = None

    def wait(self, timeout_seconds: float) -> bool:
        """See `Pull.wait`. Looks at arrays and never waits in one, which nothing could end."""
        until = min(time.monotonic() + timeout_seconds, self._until)
        while not self._ended():
            now = time.monotonic()
            if now >= until:
                break
            # In proportion to what the pull has taken: that much is lost when it ends meanwhile.
            pause = min(max((now - self._since) * _PAUSE_SHARE, _PAUSES[0]), _PAUSES[1])
            time.sleep(min(pause, until - now))
        if not self._ended() and time.monotonic() >= self._until:
            done = f"{self._next} of {len(self._arrays)} arrays had arrived"
            self._give_up(
                TransferTimeoutError(f"{self._label}: not done in {self._seconds:.1f} s, {done}")
            )
        return self._ended()

    @property
    def progress(self) -> int:
        """Arrays that have arrived; the library shows no less."""
        return self._next

    def result(self) -> list[jax.Array]:
        """See `Pull.result`."""
        if self._error is not None:
            raise self._error
        if not self._ended():
            raise TransferError(f"{self._label}: has not ended")
        try:
            # Ready is not healthy: an array that carries an error is ready too.
            jax.block_until_ready(self._arrays)
        except jax.errors.JaxRuntimeError as error:
            self._disconnect()
            self._watch.suspect()
            self._error = TransferError(f"{self._label}: {error}")
            raise self._error from error
        self._watch.arrived()
        arrived = iter(self._arrays)
        count = len(self._arrays) + len(self._empty)
        return [self._empty[i] if i in self._empty else next(arrived) for i in range(count)]

    def cancel(self) -> None:
        """See `Pull.cancel`."""
        if not self._ended():
            self._give_up(TransferError(f"{self._label}: cancelled"))

    def _ended(self) -> bool:
        if self._error is not None:
            return True
        while self._next < len(self._arrays) and is_ready(self._arrays[self._next]):
            self._next += 1
            self._connection.delivered = True
        return self._next == len(self._arrays)

    def _give_up(self, error: TransferError) -> None:
        self._error = error
        self._disconnect()
        if not self._connection.poison_if_safe():
            # Left to drain: cancelled with bytes under way, it would keep receive buffers.
            self._watch.drain(self._arrays, self._connection)
        self._watch.suspect()
        self._arrays = []
