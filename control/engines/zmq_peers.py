# SPDX-License-Identifier: Apache-2.0
"""The two ends of the zmq engine's connections: a ROUTER that serves pieces, DEALERs that ask.

A publication travels as pieces of one size, which is part of the protocol. They are asked for in
order, a few ahead of what has arrived. All of it runs on the engine's loop thread.
"""

import contextlib
import dataclasses
import hmac
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import zmq
from absl import logging

from kvferry.control.accepted import AcceptedConnections
from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.base import Spec
from kvferry.control.engines.frames import Bytes, FrameError, offsets, stream_parts, tag_of
from kvferry.control.engines.host_arrays import sizes_of
from kvferry.control.engines.loop_engine import Connection
from kvferry.control.engines.pending import PendingPull
from kvferry.control.engines.publications import Publication, Publications, fingerprint
from kvferry.control.security import CurveKeys, check_connect, endpoint
from kvferry.control.sockets import (
    DOWN_EVENTS,
    HANDSHAKE_FAILURES,
    close_socket,
    key_hint,
    listen,
    new_socket,
    next_event,
    next_event_value,
)
from kvferry.control.tally import Tally

_PIECE_BYTES = 4 << 20
_WINDOW = 4
_MAX_ASK_BYTES = 4096
_MESSAGES_PER_WAKE = 64

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Ask(msgspec.Struct, frozen=True, array_like=True, tag="kvz1"):
    """Asks for one piece of a publication; they are asked for in order, from 0."""

    pull: _Number  # Chosen by the asking side, for the reply.
    piece: _Number
    key: _Number
    fingerprint: bytes  # Of the arrays that are expected.


class _Piece(msgspec.Struct, frozen=True, array_like=True, tag="kvz1"):
    """Comes before the bytes of a piece, or says why there are none."""

    pull: _Number
    piece: _Number
    error: str = ""


_ASK_DECODER = msgspec.msgpack.Decoder(_Ask)
_PIECE_DECODER = msgspec.msgpack.Decoder(_Piece)


def _pieces(sizes: Sequence[int]) -> int:
    """Returns how many pieces arrays travel as; `stream_parts` says what is in each."""
    return max(1, -(-offsets(sizes)[1] // _PIECE_BYTES))


@dataclasses.dataclass
class _Serving:
    """A pull that is being served.

    Attributes:
        puller: Its connection, and its number there.
        arrays: Each 1-D, uint8.
        next_piece: The only one that may be asked for.
    """

    puller: tuple[bytes, int]
    arrays: list[Bytes]
    next_piece: int = 0


class ZmqSource:
    """The ROUTER that serves publications.

    Args:
        loop: The engine's loop.
        publications: What may be asked for.
        keys: See `EngineOptions`.
    """

    def __init__(
        self, loop: ControlLoop, publications: Publications[list[Bytes]], keys: CurveKeys | None
    ) -> None:
        self._loop = loop
        self._publications = publications
        self._keys = keys
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: Any = None
        # Pulls over a connection that has closed hold nothing here.
        self._accepted = AcceptedConnections(loop, Tally(), lambda peer: None)
        self._serving: dict[bytes, _Serving] = {}

    def open(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises as `sockets.listen` does."""
        made, port = listen(self._loop, host, port, self._keys, _MAX_ASK_BYTES)
        self._socket = made
        self._loop.watch(made, self._receive)
        self._monitor = made.get_monitor_socket(AcceptedConnections.EVENTS)
        self._loop.watch(self._monitor, self._see_accepted)
        self._accepted.watch(made)
        return port

    def forget(self, key: int) -> None:
        """Ends the pull of a publication that is no more."""
        self._serving.pop(tag_of(key), None)

    def _see_accepted(self) -> None:
        while (seen := next_event_value(self._monitor)) is not None:
            self._accepted.see(*seen)

    def _receive(self) -> None:
        assert self._socket is not None
        for _ in range(_MESSAGES_PER_WAKE):
            try:
                frames = self._accepted.receive()
            except zmq.Again:
                return
            try:
                peer, frame = frames
                self._take(peer, _ASK_DECODER.decode(frame))
            except (ValueError, msgspec.DecodeError, FrameError) as error:
                # Whoever is no peer or does not prove an id gets no answer.
                logging.log_every_n_seconds(logging.DEBUG, "zmq request ignored: %s", 5, error)

    def _take(self, peer: bytes, ask: _Ask) -> None:
        tag = tag_of(ask.key)
        if ask.piece:
            self._go_on(peer, tag, ask)
            return

        def is_proven(key: int) -> bool:
            return hmac.compare_digest(key.to_bytes(8, "little"), ask.key.to_bytes(8, "little"))

        def answer(found: Publication[list[Bytes]] | str) -> None:
            if isinstance(found, str):
                self._send(peer, _Piece(ask.pull, 0, found))
                return
            assert found.value is not None
            self._serving[tag] = _Serving((peer, ask.pull), found.value)
            self._go_on(peer, tag, ask)

        self._publications.claim(tag, ask.fingerprint, is_proven, answer)

    def _go_on(self, peer: bytes, tag: bytes, ask: _Ask) -> None:
        serving = self._serving.get(tag)
        if serving is None or serving.puller != (peer, ask.pull):
            self._send(peer, _Piece(ask.pull, ask.piece, "it was released while it was pulled"))
            return
        sizes = [array.size for array in serving.arrays]
        count = _pieces(sizes)
        if ask.piece != serving.next_piece or ask.piece >= count:
            raise FrameError(f"piece {ask.piece} of {count} instead of {serving.next_piece}")
        serving.next_piece += 1
        parts = [
            serving.arrays[leaf][begin:end]
            for leaf, begin, end in stream_parts(sizes, ask.piece, count)
        ]
        self._send(peer, _Piece(ask.pull, ask.piece), parts)

    def _send(self, peer: bytes, piece: _Piece, parts: Sequence[Bytes] = ()) -> None:
        assert self._socket is not None
        head = msgspec.msgpack.encode(piece)
        frames: list[bytes | memoryview] = [peer, head, *(part.data for part in parts)]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # Gone, or it has stopped to read: then its own deadline ends the pull.
            logging.log_every_n_seconds(logging.DEBUG, "zmq piece not sent: %s", 5, error)


class ZmqPull(PendingPull):
    """A pull that fills `memory`; see `PendingPull`."""

    def __init__(
        self,
        source: tuple[str, int],
        specs: Sequence[Spec],
        seconds: float,
        on_end: Callable[[PendingPull], None],
        memory: Bytes,
    ) -> None:
        super().__init__(source, specs, seconds, on_end)
        self.memory = memory
        self.fingerprint = fingerprint(specs)
        self.sizes = sizes_of(specs)
        self.starts, _ = offsets(self.sizes)
        self.count = _pieces(self.sizes)
        self.asked = 0
        self.arrived = 0

    def take(self, piece: int, frames: Sequence[zmq.Frame]) -> str:
        """Puts a piece into place; returns what is wrong with it, or an empty text."""
        parts = list(stream_parts(self.sizes, piece, self.count))
        if piece != self.arrived or [len(each) for each in frames] != [e - b for _, b, e in parts]:
            return f"piece {piece} of {self.count} is not as it should be"
        for frame, (leaf, begin, end) in zip(frames, parts, strict=True):
            start = self.starts[leaf]
            self.memory[start + begin : start + end] = np.frombuffer(frame.buffer, np.uint8)
            self.received += end - begin
        self.arrived += 1
        if self.arrived == self.count:
            self.complete(self.memory)
        return ""


class ZmqTarget(Connection[ZmqPull]):
    """A DEALER with one connection to a peer; see `Connection`.

    Args:
        loop: The engine's loop.
        address: The peer's.
        keys: See `EngineOptions`.
        on_down: See `Connection`.

    Raises:
        ValueError: If that is not the address of a host, or one beyond loopback without keys.
        zmq.ZMQError: If nobody can have that address, or there are no more sockets.
    """

    def __init__(
        self,
        loop: ControlLoop,
        address: str,
        keys: CurveKeys | None,
        on_down: Callable[[str], None],
    ) -> None:
        super().__init__(address, on_down)
        self._loop = loop
        self._keys = keys
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        check_connect(host, keys)
        self._socket = new_socket(loop, zmq.DEALER, host)
        if keys is not None:
            keys.secure_client(self._socket)
        self._monitor: Any = self._socket.get_monitor_socket()
        loop.watch(self._monitor, self._see_events)
        loop.watch(self._socket, self._receive)
        try:
            self._socket.connect(endpoint(host, port))
        except zmq.ZMQError:
            self.close("")
            raise

    def forget(self, pull: PendingPull) -> None:
        """See `Connection.forget`; the connection ends with the last pull that is given up."""
        if self.pulls.pop(pull.number, None) is not None and not self.pulls:
            # If the peer hangs, the next pull must not wait behind this one.
            self._go_down("its pulls were given up")

    def _shut(self) -> None:
        close_socket(self._loop, self._socket, self._monitor, 0.0)

    def _ask(self, pull: ZmqPull) -> None:
        # The next piece. Those after the first follow once that shows that the id is good.
        ask = _Ask(pull.number, pull.asked, pull.key, pull.fingerprint)
        pull.asked += 1
        with contextlib.suppress(zmq.Again):  # It takes nothing any more: the deadline ends it.
            self._socket.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_WAKE):
            if not self.open:
                return
            try:
                head, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                piece = _PIECE_DECODER.decode(head.buffer)
            except msgspec.DecodeError as error:
                self._go_down(f"it does not speak the protocol of this engine: {error}")
                return
            pull = self.pulls.get(piece.pull)
            if pull is not None:  # Else it was given up.
                self._take(pull, piece, frames)

    def _take(self, pull: ZmqPull, piece: _Piece, frames: Sequence[zmq.Frame]) -> None:
        problem = piece.error or pull.take(piece.piece, frames)
        if problem or pull.ended:
            del self.pulls[pull.number]
        if problem:
            pull.fail(problem)
        while not pull.ended and pull.asked < min(pull.arrived + _WINDOW, pull.count):
            self._ask(pull)

    def _see_events(self) -> None:
        while self.open and (event := next_event(self._monitor)) is not None:
            if event in DOWN_EVENTS:
                self._receive()  # What the peer said before it closed comes first.
                reason = DOWN_EVENTS[event]
                if event in HANDSHAKE_FAILURES:
                    reason = f"{reason}; {key_hint(self._keys)}"
                self._go_down(reason)
