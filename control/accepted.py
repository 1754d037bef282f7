# SPDX-License-Identifier: Apache-2.0
"""The connections of a listening ZMQ socket: tells when one closes, and ends those that flood it.

A ROUTER knows its peers by their messages only. The socket's monitor tells of connections, by the
descriptor of their socket, and each message tells which one it came over; so the end of a process
is seen at once, and not only by its silence.

libzmq keeps the frames of a message until the last one has come. It bounds the size of a frame and
the number of messages, but neither the frames of a message nor all its bytes. So what a connection
has sent is read from the kernel, now and then, and compared with whether anything complete came out
of it. Linux only; elsewhere that is not bounded.
"""

import array
import contextlib
import dataclasses
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator

import zmq
from absl import logging

from kvferry.control.control_loop import ControlLoop, Timer
from kvferry.control.sockets import MAX_UNREAD_REQUESTS
from kvferry.control.tally import Tally
from kvferry.control.wire import MAX_REQUEST_BYTES

# How often each connection is looked at.
_LOOK_SECONDS = 0.1
_CONNECTIONS_PER_TURN = 32
# Of bytes_received in the kernel's struct tcp_info (linux/tcp.h), since Linux 4.1.
_RECEIVED_OFFSET = 128
# Complete messages that were not read yet.
_MAX_UNREAD_BYTES = MAX_UNREAD_REQUESTS * MAX_REQUEST_BYTES
_INFO_BYTES = _RECEIVED_OFFSET + 8


@dataclasses.dataclass
class _Connection:
    """What is known of a connection.

    Attributes:
        ends: Its two addresses, by which it is told from a later one with the same descriptor.
        peer: Who speaks over it, or None.
        received: Bytes that libzmq had read when a complete message last had come.
        heard: Whether a complete message has come since the last look.
        ended: Whether this end has ended it.
    """

    ends: tuple[object, object]
    peer: bytes | None = None
    received: int = 0
    heard: bool = False
    ended: bool = False


class AcceptedConnections:
    """Watches the connections of one listening socket. Loop's thread only.

    Args:
        loop: The control loop.
        tally: Gets the total of connections that were ended for flooding, "refused_floods".
        on_closed: Called with the peer whose connection has closed. What it sent before may not
            have been received yet.
    """

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

    def __init__(self, loop: ControlLoop, tally: Tally, on_closed: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._tally = tally
        self._on_closed = on_closed
        self._watched: zmq.Socket[bytes] | None = None
        self._connections: dict[int, _Connection] = {}  # By descriptor.
        self._by_peer: dict[bytes, _Connection] = {}
        self._due: list[int] = []
        self._timer: Timer | None = None

    def watch(self, listening: zmq.Socket[bytes]) -> None:
        """Says which socket it is; its monitor has to tell of `EVENTS`."""
        self._watched = listening

    def see(self, event: zmq.Event, descriptor: int) -> None:
        """Takes what the socket's monitor has told; other events than `EVENTS` are ignored."""
        if event == zmq.EVENT_ACCEPTED:
            with contextlib.suppress(OSError), _own(descriptor) as own:  # Else gone already.
                self._connections[descriptor] = _Connection(_ends(own))
                if self._timer is None:
                    self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)
        elif event == zmq.EVENT_DISCONNECTED:
            connection = self._connections.pop(descriptor, None)
            if connection is not None and connection.peer is not None:
                del self._by_peer[connection.peer]
                self._on_closed(connection.peer)

    def receive(self) -> list[bytes]:
        """Receives a message, and notes over which connection it came.

        Returns:
            Its frames; the first one names the peer.

        Raises:
            zmq.Again: If there is none.
        """
        assert self._watched is not None
        peer = self._watched.recv(zmq.NOBLOCK)
        connection = self._by_peer.get(peer)
        frames = [peer]
        while self._watched.getsockopt(zmq.RCVMORE):
            if connection is not None:
                frames.append(self._watched.recv())
            else:
                # Slower, but it tells the descriptor.
                frame = self._watched.recv(copy=False)
                frames.append(frame.bytes)
                connection = self._attribute(peer, frame)
        if connection is not None:
            connection.heard = True
        return frames

    def _attribute(self, peer: bytes, frame: zmq.Frame) -> _Connection | None:
        try:
            descriptor = int(frame.get(zmq.SRCFD))
            connection = self._connections.get(descriptor)
            if connection is None or connection.peer is not None:
                return None
            # The monitor may yet have to tell that the descriptor is another connection's now.
            with _own(descriptor) as own:
                if _ends(own) != connection.ends:
                    return None
        except (OSError, zmq.ZMQError):
            return None  # Closed already; or the peer speaks an old protocol, as none of ours does.
        connection.peer = peer
        self._by_peer[peer] = connection
        return connection

    def close(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        assert self._watched is not None
        self._timer = None
        if not self._connections:
            return
        # A few at a time: hundreds at once would hold up messages for milliseconds.
        turns = -(-len(self._connections) // _CONNECTIONS_PER_TURN)
        self._timer = self._loop.call_later(_LOOK_SECONDS / turns, self._look)
        due = self._due or list(self._connections)
        now, self._due = due[:_CONNECTIONS_PER_TURN], due[_CONNECTIONS_PER_TURN:]
        unread = int(self._watched.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        limit = 2 * MAX_REQUEST_BYTES + (_MAX_UNREAD_BYTES if unread else 0)
        ended = sum(self._ended(each, limit) for each in now if each in self._connections)
        if ended:
            self._tally.add("refused_floods", ended)
            logging.warning("ended %d connections that sent a message without end", ended)

    def _ended(self, descriptor: int, limit: int) -> bool:
        connection = self._connections[descriptor]
        if connection.ended:
            return False
        try:
            with _own(descriptor) as own:
                if _ends(own) != connection.ends:
                    return False
                received = _received(own)
                if connection.heard:
                    connection.received, connection.heard = received, False
                if received - connection.received <= limit:
                    return False
                # libzmq closes it when it sees the end. What is on its way is then of no use.
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                own.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # It has closed; the monitor tells so.
        connection.ended = True
        return True


def _ends(own: socket.socket) -> tuple[object, object]:
    return own.getsockname(), own.getpeername()


@contextlib.contextmanager
def _own(descriptor: int) -> Iterator[socket.socket]:
    """Opens a descriptor of our own: libzmq's may be closed, and used again, at any moment."""
    copy = os.dup(descriptor)
    try:
        own = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # It is no socket any more.
        raise
    with own:
        yield own


def _received(own: socket.socket) -> int:
    if not hasattr(socket, "TCP_INFO"):
        return 0
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return 0
    waiting = array.array("i", [0])  # In the kernel yet.
    fcntl.ioctl(own, termios.FIONREAD, waiting)
    return int(struct.unpack_from("=Q", info, _RECEIVED_OFFSET)[0]) - waiting[0]
