# SPDX-License-Identifier: Apache-2.0
"""One pull of the tcp engine."""

import contextlib
import math
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import jax

from kvferry.control.engines.base import Spec
from kvferry.control.engines.frames import (
    END_BYTES,
    GRANT_HEAD_BYTES,
    NONCE_BYTES,
    Bytes,
    FrameError,
    Grant,
    check_end,
    grant_length,
    leaves_of,
    unpack_grant,
)
from kvferry.control.engines.host_arrays import are_in, arrays_in, on_one_cpu_device, total_bytes
from kvferry.control.engines.pending import PendingPull

_STREAM_BYTES = 8 << 20
# A wait this long may be overrun by the receive limit of a connection, which is as short.
_BLOCK_SECONDS = 0.04


class GivenUp(Exception):  # noqa: N818 (a signal within the engine, not an error)
    """The pull that a stream belongs to has ended."""


OnEnd: TypeAlias = Callable[["TcpPull", socket.socket, str | None], None]


class TcpPull(PendingPull):
    """A pull in progress.

    Its streams are received by worker threads; but the only stream of a small one, if a connection
    is open already, by the thread that waits for it: waking another and being woken by it would
    take as long as the bytes do.

    Args:
        source: The peer's address, and the id.
        specs: The arrays.
        channels: Largest number of streams.
        seconds: Time until it fails.

    Attributes:
        num_bytes: Of all arrays, laid out as in `frames.offsets`.
        memory: Where they go; to be set before anything is received.
    """

    memory: Bytes

    def __init__(
        self,
        source: tuple[str, int],
        specs: Sequence[Spec],
        channels: int,
        seconds: float,
    ) -> None:
        super().__init__(source, specs, seconds)
        self.num_bytes = total_bytes(specs)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        # A small transfer is faster on one stream than split over threads.
        self.count = max(1, min(channels, self.num_bytes // _STREAM_BYTES))
        self.running = self.count
        self._done = 0
        self._early: list[jax.Array] = []
        self._here: _Reader | None = None
        self._reading = threading.Lock()

    def wait(self, timeout_seconds: float) -> bool:
        """See `Pull.wait`."""
        until = min(time.monotonic() + timeout_seconds, self._until)
        self._read(until)
        ended = super().wait(until - time.monotonic())
        self._drop_ended()
        return ended

    def cancel(self) -> None:
        """See `Pull.cancel`. Any thread."""
        super().cancel()
        self._drop_ended()

    def check(self, received: int = 0) -> None:
        """Counts bytes that have arrived.

        Raises:
            GivenUp: If nobody wants them any more.
        """
        self.received += received
        if self._error is not None or time.monotonic() >= self._until:
            raise GivenUp

    def finish_stream(self, problem: str) -> None:
        """Notes the end of a stream, and what was wrong with it if anything."""
        with self._changed:
            self.running -= 1
            if problem:
                self.fail(problem)
            else:
                self._done += 1
            if self._done == self.count:
                self.complete(self.memory)

    def make_early(self) -> None:
        """Makes the arrays while their bytes are on the way: of many that takes as long as these.

        Only on CPU, where arrays are made of memory and not from it, and only if each is indeed
        where its bytes will arrive. Until the pull has ended well nobody gets to see them.
        """
        if on_one_cpu_device(self.specs):
            arrays = arrays_in(self.memory, self.specs)
            self._early = arrays if are_in(self.memory, arrays, self.specs) else []

    def check_grant(self, grant: Grant) -> None:
        """Checks that what is coming is what was asked for.

        Raises:
            FrameError: If it is not.
        """
        ours = leaves_of(self.specs)
        if grant.leaves != ours:
            raise FrameError(f"published {grant.leaves[:3]}.., asked for {ours[:3]}..")

    def read_here(self, peer: socket.socket, on_end: OnEnd) -> None:
        """Has `wait` receive the only stream.

        Args:
            peer: The connection, on which it was asked for.
            on_end: Called with the pull, the connection (closed if it broke or is in the middle of
                something), and what was wrong: an empty text if nothing was, None if there was no
                answer at all because the peer had closed the connection before.
        """
        self._here = _Reader(self, peer, on_end)

    def _read(self, until: float) -> None:
        with self._reading:
            here = self._here
            while here is not None and not self.ended:
                left = until - time.monotonic()
                if here.step(may_block=left >= _BLOCK_SECONDS):
                    self._here = None
                    return
                left = until - time.monotonic()
                if left <= 0:
                    return
                if left < _BLOCK_SECONDS:
                    here.poller.poll(math.ceil(left * 1000))

    def _arrays(self, memory: Bytes) -> list[jax.Array]:
        return self._early or super()._arrays(memory)

    def _drop_ended(self) -> None:
        if self._here is None or not self.ended:
            return
        self._here.shut()  # Wakes a thread that waits in `_read`; that one comes here then.
        if self._reading.acquire(blocking=False):
            here, self._here = self._here, None
            self._reading.release()
            if here is not None:
                here.end("given up")


class _Reader:
    """Receives the only stream of a pull, as far as it has come."""

    def __init__(self, pull: TcpPull, peer: socket.socket, on_end: OnEnd) -> None:
        self.poller = select.poll()
        self.poller.register(peer, select.POLLIN)
        self._pull = pull
        self._peer = peer
        self._on_end = on_end
        self._answered = False
        self._how = 0
        self._steps = self._receive()

    def step(self, *, may_block: bool) -> bool:
        """Goes on; returns whether that was the end.

        Args:
            may_block: Whether it may wait for as long as the connection's receive limit.
        """
        self._how = socket.MSG_WAITALL if may_block else socket.MSG_DONTWAIT
        try:
            next(self._steps)
            return False
        except StopIteration as stop:
            self._on_end(self._pull, self._peer, stop.value)
        except (OSError, ValueError) as error:
            self.end(str(error) if self._answered else None)
        return True

    def shut(self) -> None:
        """Ends the connection, so that whoever waits for it wakes up."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def end(self, problem: str | None) -> None:
        """Closes the connection and reports."""
        self._steps.close()  # Or it and this object would keep each other, and the memory, alive.
        self._peer.close()
        self._on_end(self._pull, self._peer, problem)

    def _receive(self) -> Generator[None, None, str]:
        pull = self._pull
        head = bytearray(GRANT_HEAD_BYTES)
        yield from self._fill(memoryview(head))
        self._answered = True
        body = bytearray(grant_length(head))
        yield from self._fill(memoryview(body))
        grant = unpack_grant(body)
        if grant.error:
            return grant.error
        pull.check_grant(grant)
        yield from self._fill(pull.memory.data)
        tail = bytearray(END_BYTES)
        yield from self._fill(memoryview(tail))
        check_end(tail, 0, pull.memory.size)
        return ""

    def _fill(self, into: memoryview) -> Generator[None, None, None]:
        done = 0
        while done < len(into):
            try:
                got = self._peer.recv_into(into[done:], 0, self._how)
            except BlockingIOError:
                yield
                continue
            if not got:
                raise ConnectionError(f"closed by the peer after {done} of {len(into)} bytes")
            done += got
            self._pull.received += got
