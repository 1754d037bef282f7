# SPDX-License-Identifier: Apache-2.0
"""Ends connections that send one message without end.

libzmq keeps the frames of a message until the last one has come. It bounds the size of a frame and
the number of messages, but neither the frames of a message nor all its bytes. So what a connection
has sent is read from the kernel, now and then, and compared with whether anything complete came out
of it. Linux only; elsewhere nothing is bounded.
"""

import array
import contextlib
import dataclasses
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator

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
        received: Bytes that libzmq had read when a complete message last had come.
        heard: Whether a complete message has come since the last look.
    """

    ends: tuple[object, object]
    received: int = 0
    heard: bool = False


class FloodWatch:
    """Watches the connections of one listening socket. Loop's thread only.

    Args:
        loop: The control loop.
        tally: Gets the total of connections that were ended, "refused_floods".
    """

    def __init__(self, loop: ControlLoop, tally: Tally) -> None:
        self._loop = loop
        self._watched: zmq.Socket[bytes] | None = None
        self._tally = tally
        self._connections: dict[int, _Connection] = {}
        self._timer: Timer | None = None

    def watch(self, listening: zmq.Socket[bytes]) -> None:
        """Says which socket it is."""
        self._watched = listening

    def accepted(self, descriptor: int) -> None:
        """Notes a new connection, by the descriptor that libzmq has for it."""
        try:
            with _own(descriptor) as own:
                ends = (own.getsockname(), own.getpeername())
        except OSError:
            return  # Gone already.
        self._connections[descriptor] = _Connection(ends)
        if self._timer is None:
            self._timer = self._loop.every(_LOOK_SECONDS, self._look)

    def heard(self, frame: zmq.Frame) -> None:
        """Notes that a message is complete, by its last frame."""
        try:
            connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        except zmq.ZMQError:
            return  # From a peer that speaks an old protocol, which none of ours does.
        if connection is not None:
            connection.heard = True

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
        try:
            with _own(descriptor) as own:
                if (own.getsockname(), own.getpeername()) != connection.ends:
                    del self._connections[descriptor]
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
            del self._connections[descriptor]
            return False
        del self._connections[descriptor]
        return True


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
