# SPDX-License-Identifier: Apache-2.0
"""Connections of the shm engine: Unix sockets with abstract names, between processes of one user.

The name is in the kernel only and goes with the process. Reaching it proves that both processes run
under one kernel and in one network namespace, which no host name proves. Each message is one packet
of MessagePack; a grant carries the file descriptor of its segment the first time.
"""

import collections
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.frames import FrameError

_PREFIX = "kvferry-shm-"
_ADDRESS = re.compile(r"kvferry-shm-[0-9a-f]{32}")
_MAX_PACKET_BYTES = 16 << 10
_MAX_WAITING = 8192
_PACKETS_PER_WAKE = 64
_RETRY_SECONDS = 0.002
_BACKLOG = 256
_CREDENTIALS = struct.Struct("@iII")


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """P's first word on a connection: what proofs on it must be made over."""

    challenge: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """D asks for a publication; see `frames` for tag, proof and nonce."""

    pull: int
    tag: bytes
    proof: bytes
    nonce: bytes
    fingerprint: bytes


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """P lends the segment that holds the arrays, or says why it does not."""

    pull: int
    error: str = ""
    lease: int = -1
    segment: int = -1


class Free(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """D has no array over what was lent any more."""

    lease: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """P will not lend this segment again."""

    segment: int


Packet: TypeAlias = Challenge | Ask | Grant | Free | Forget
_DECODER = msgspec.msgpack.Decoder(Packet)


def listen() -> tuple[socket.socket, str]:
    """Opens a socket with a new name.

    Returns:
        The socket and its address.

    Raises:
        OSError: If that is not possible.
    """
    address = _PREFIX + secrets.token_hex(16)
    listener = _new_socket()
    listener.bind(f"\0{address}")
    listener.listen(_BACKLOG)
    return listener, address


def connect(address: str) -> socket.socket:
    """Connects to a process on this host; does not block.

    Args:
        address: As `listen` returned it there.

    Returns:
        The connection.

    Raises:
        FrameError: If the address is of another kind, or its process another user's.
        OSError: If there is no such process on this host.
    """
    if not _ADDRESS.fullmatch(address):
        raise FrameError(f"{address!r} is not an address of the shm engine")
    made = _new_socket()
    try:
        made.connect(f"\0{address}")
        check_user(made)
    except OSError:
        made.close()
        raise
    return made


def check_user(connection: socket.socket) -> None:
    """Refuses a connection to a process of another user.

    Raises:
        FrameError: If it is one.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise FrameError(f"the process at the other end is of user {user}, not {os.geteuid()}")


class Link:
    """One connection. Loop's thread only.

    Args:
        loop: The engine's loop.
        connection: A connection that does not block; closed with the link.
        on_packet: Called with each packet and the file descriptor that came with it, or -1. The
            descriptor is the callee's. May raise `FrameError` or OSError to end the link.
        on_down: Called once with the reason when the link has ended by itself.
    """

    def __init__(
        self,
        loop: ControlLoop,
        connection: socket.socket,
        on_packet: Callable[[Packet, int], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.open = True
        self._loop = loop
        self._connection = connection
        self._on_packet = on_packet
        self._on_down = on_down
        self._waiting: collections.deque[tuple[bytes, int]] = collections.deque()
        loop.watch(connection.fileno(), self._receive)

    def send(self, packet: Packet, fd: int = -1) -> None:
        """Sends a packet, now or as soon as the peer reads.

        Args:
            packet: What to send.
            fd: A file descriptor to send with it, or -1. The caller may close it at once.
        """
        if not self.open:
            return
        try:
            own = os.dup(fd) if fd >= 0 else -1
        except OSError as error:
            self._end(f"cannot share memory: {error}")
            return
        self._waiting.append((msgspec.msgpack.encode(packet), own))
        if len(self._waiting) == 1:
            self._flush()
        elif len(self._waiting) > _MAX_WAITING:
            self._end("the peer has stopped to read")

    def close(self) -> None:
        """Ends the link; nobody is called. Idempotent."""
        if self.open:
            self.open = False
            while self._waiting:
                self._sent()
            self._loop.unwatch(self._connection.fileno())
            self._connection.close()

    def _flush(self) -> None:
        try:
            while self.open and self._waiting:
                data, fd = self._waiting[0]
                socket.send_fds(self._connection, [data], [fd] if fd >= 0 else [])
                self._sent()
        except BlockingIOError:
            self._loop.call_later(_RETRY_SECONDS, self._flush)
        except OSError as error:
            self._end(f"closed by the peer: {error}")

    def _sent(self) -> None:
        _, fd = self._waiting.popleft()
        if fd >= 0:
            os.close(fd)

    def _receive(self) -> None:
        for _ in range(_PACKETS_PER_WAKE):
            if not self.open:
                return
            try:
                if not self._receive_one():
                    self._end("closed by the peer, whose process or engine has ended")
            except BlockingIOError:
                return
            except (OSError, msgspec.DecodeError) as error:
                self._end(str(error))

    def _receive_one(self) -> bool:
        """Takes a packet; returns False at the end of the connection."""
        room = socket.CMSG_LEN(struct.calcsize("@i"))  # For one descriptor.
        data, extra, flags, _ = self._connection.recvmsg(
            _MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC
        )
        fds = [
            fd
            for level, kind, raw in extra
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (fd,) in struct.iter_unpack("@i", raw)
        ]
        if not data:
            return False
        try:
            if flags & socket.MSG_TRUNC:
                raise FrameError(f"a packet of more than {_MAX_PACKET_BYTES} bytes")
            packet = _DECODER.decode(data)
        except (FrameError, msgspec.DecodeError):
            for fd in fds:
                os.close(fd)
            raise
        self._on_packet(packet, fds[0] if fds else -1)
        return True

    def _end(self, reason: str) -> None:
        if self.open:
            self.close()
            self._on_down(reason)


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made
