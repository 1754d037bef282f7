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

_LOOK_SECONDS = 0.1
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
        self._connections: dict[int, _Connection] = {}
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
                    self._timer = self._loop.every(_LOOK_SECONDS, self._look)
        elif event == zmq.EVENT_DISCONNECTED:
            connection = self._connections.pop(descriptor, None)
            if connection is not None and connection.peer is not None:
                self._on_closed(connection.peer)

    def heard(self, peer: bytes, frame: zmq.Frame) -> None:
        """Notes a complete message.

        Args:
            peer: Who sent it.
            frame: Its last frame.
        """
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return  # From a peer that speaks an old protocol, which none of ours does.
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        connection.heard = True
        if connection.peer is None:
            # The monitor may yet have to tell that the descriptor is another connection's now.
            with contextlib.suppress(OSError), _own(descriptor) as own:
                connection.peer = peer if _ends(own) == connection.ends else None

    def close(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        assert self._watched is not None
        unread = int(self._watched.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        limit = 2 * MAX_REQUEST_BYTES + (_MAX_UNREAD_BYTES if unread else 0)
        ended = sum(self._ended(each, limit) for each in list(self._connections))
        if not self._connections:
            self.close()
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
