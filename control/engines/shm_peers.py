# SPDX-License-Identifier: Apache-2.0
"""The two ends of the shm engine's connections: one lends segments, the other maps them.

All of it runs on the engine's loop thread.
"""

import errno
import functools
import itertools
import os
import secrets
import socket
from collections.abc import Callable

from absl import logging

from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.frames import (
    CHALLENGE_BYTES,
    NONCE_BYTES,
    FrameError,
    Request,
    is_proven,
    prove,
    tag_of,
)
from kvferry.control.engines.host_arrays import total_bytes
from kvferry.control.engines.loop_engine import Connection
from kvferry.control.engines.pending import PendingPull
from kvferry.control.engines.publications import Publication, Publications, fingerprint
from kvferry.control.engines.shm_link import (
    Ask,
    Challenge,
    Forget,
    Free,
    Grant,
    Link,
    Packet,
    check_user,
    connect,
    listen,
)
from kvferry.control.engines.shm_segments import Mapping, Segment, SegmentPool

_MAX_CONNECTIONS = 256
_PAUSE_SECONDS = 0.1


class _Borrower:
    """A connection to a process that pulls.

    Attributes:
        leases: What it has, by the number under which it gives it back.
        known: Segments whose file it has.
    """

    def __init__(self, source: "ShmSource", connection: socket.socket) -> None:
        self.leases: dict[int, Segment] = {}
        self.known: set[int] = set()
        self._source = source
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._leases = itertools.count()
        self._link = Link(source.loop, connection, self._take, self._on_down)
        self._link.send(Challenge(self._challenge))

    def forget(self, segment: Segment) -> None:
        """Tells it that a segment is no more."""
        if segment.number in self.known:
            self.known.discard(segment.number)
            self._link.send(Forget(segment.number))

    def close(self) -> None:
        """Ends the connection. What it has borrowed is lost."""
        self._link.close()
        leases, self.leases = list(self.leases.values()), {}
        for segment in leases:
            self._source.pool.lose(segment)

    def _on_down(self, reason: str) -> None:
        logging.vlog(1, "shm connection ended: %s", reason)
        self._source.borrowers.discard(self)
        self.close()

    def _take(self, packet: Packet, fd: int) -> None:
        if fd >= 0:
            os.close(fd)
        match packet:
            case Ask():
                self._ask(packet)
            case Free(lease=lease):
                segment = self.leases.pop(lease, None)
                if segment is not None:
                    self._source.pool.give_back(segment)
            case _:
                raise FrameError(f"unexpected packet {type(packet).__name__}")

    def _ask(self, ask: Ask) -> None:
        request = Request(ask.tag, ask.proof, ask.nonce, 0, 1)

        def answer(found: Publication[Segment] | str) -> None:
            if isinstance(found, str):
                self._link.send(Grant(ask.pull, found))
            elif self._link.open:
                assert found.value is not None
                self._lend(ask.pull, found.value)

        self._source.publications.claim(
            ask.tag,
            ask.fingerprint,
            lambda key: is_proven(request, key, self._challenge),
            answer,
        )

    def _lend(self, pull: int, segment: Segment) -> None:
        lease = next(self._leases)
        self._source.pool.lend(segment)
        self.leases[lease] = segment
        fd = -1 if segment.number in self.known else segment.fd
        self.known.add(segment.number)
        self._link.send(Grant(pull, "", lease, segment.number), fd)


class ShmSource:
    """Listens for processes that pull, and lends them what is published.

    Args:
        loop: The engine's loop.
        publications: What may be asked for.
        pool: The segments that they are in.

    Attributes:
        loop: As given.
        publications: As given.
        pool: As given.
        borrowers: The connections.
    """

    def __init__(
        self, loop: ControlLoop, publications: Publications[Segment], pool: SegmentPool
    ) -> None:
        self.loop = loop
        self.publications = publications
        self.pool = pool
        self.borrowers: set[_Borrower] = set()
        self._listener: socket.socket | None = None

    def open(self) -> str:
        """Listens; returns the address.

        Raises:
            OSError: If that is not possible.
        """
        self._listener, address = listen()
        self._watch()
        return address

    def forget(self, segment: Segment) -> None:
        """Tells all that a segment is no more, and closes it."""
        for borrower in list(self.borrowers):  # One whose connection breaks leaves the set.
            borrower.forget(segment)
        segment.close()

    def close(self) -> None:
        """Closes all connections."""
        if self._listener is not None:
            self.loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        borrowers, self.borrowers = list(self.borrowers), set()
        for borrower in borrowers:
            borrower.close()

    def _watch(self) -> None:
        if self._listener is not None:
            self.loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # It stays readable: not to be looked at again at once.
                logging.log_every_n_seconds(logging.WARNING, "shm engine: accept: %s", 5, error)
                self.loop.unwatch(self._listener.fileno())
                self.loop.call_later(_PAUSE_SECONDS, self._watch)
            return  # Else it has gone again.
        connection.setblocking(False)
        try:
            check_user(connection)
            if len(self.borrowers) >= _MAX_CONNECTIONS:
                raise FrameError(f"there are {_MAX_CONNECTIONS} connections already")
        except OSError as error:
            logging.log_every_n_seconds(logging.WARNING, "shm connection refused: %s", 5, error)
            connection.close()
            return
        self.borrowers.add(_Borrower(self, connection))


class ShmTarget(Connection[PendingPull]):
    """A connection to a process of this host that publishes; see `Connection`.

    Args:
        loop: The engine's loop.
        address: Of the peer.
        on_down: See `Connection`.

    Raises:
        OSError: If there is no such process on this host, or it is another user's.
    """

    def __init__(self, loop: ControlLoop, address: str, on_down: Callable[[str], None]) -> None:
        super().__init__(address, on_down)
        self._loop = loop
        self._challenge = b""
        self._mappings: dict[int, Mapping] = {}
        self._link = Link(loop, connect(address), self._take, self._go_down)

    def _shut(self) -> None:
        # Arrays that live keep what they refer to.
        self._link.close()
        self._mappings.clear()

    def _ask(self, pull: PendingPull) -> None:
        if not self._challenge:
            return  # Until the peer has said what to prove.
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = prove(pull.key, self._challenge, nonce, 0, 1)
        self._link.send(Ask(pull.number, tag_of(pull.key), proof, nonce, fingerprint(pull.specs)))

    def _take(self, packet: Packet, fd: int) -> None:
        mapping = Mapping(fd) if fd >= 0 else None
        match packet:
            case Challenge(challenge=challenge) if not self._challenge:
                if len(challenge) != CHALLENGE_BYTES:
                    raise FrameError(f"a challenge of {len(challenge)} bytes")
                self._challenge = challenge
                for pull in list(self.pulls.values()):
                    self._ask(pull)
            case Grant():
                if mapping is not None:
                    self._mappings[packet.segment] = mapping
                self._granted(packet)
            case Forget(segment=number):
                self._mappings.pop(number, None)
            case _:
                raise FrameError(f"unexpected packet {type(packet).__name__}")

    def _granted(self, grant: Grant) -> None:
        pull = self.pulls.pop(grant.pull, None)
        if grant.error:
            if pull is not None:
                pull.fail(grant.error)
            return
        free = functools.partial(
            self._loop.post, functools.partial(self._link.send, Free(grant.lease))
        )
        if pull is None:
            free()  # It was given up.
            return
        mapping = self._mappings.get(grant.segment)
        if mapping is None:
            pull.fail("the peer has lent a segment that it has not sent")
            raise FrameError("a segment without its file")
        try:
            memory = mapping.window(total_bytes(pull.specs), free)
        except FrameError as error:
            pull.fail(str(error))
            raise
        pull.received = memory.size
        # If the pull has ended meanwhile, nothing refers to the memory, and it is given back.
        pull.complete(memory)
