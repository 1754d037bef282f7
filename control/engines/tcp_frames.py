# SPDX-License-Identifier: Apache-2.0
"""What travels on a connection of the tcp engine.

The listening side opens with a random challenge. The pulling side answers with a request: a tag
that names the publication, a proof that it knows the id (a digest keyed with it over the
challenge), and which of how many streams this connection carries. The listening side replies with
a grant: an error, or the shapes and dtypes of the arrays. Then come the bytes of the stream and
their checksum. After that the connection is ready for another challenge.

All arrays of a publication lie one after the other, each at a multiple of 64 bytes, so that the
receiver can hand them to JAX without a copy; stream i of n carries the i-th part of that.
"""

import hashlib
import hmac
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

ALIGNMENT = 64
CHALLENGE_BYTES = 16
NONCE_BYTES = 16

_MAGIC = b"kvT1"
_TAG_BYTES = 16
_PROOF_BYTES = 32
_REQUEST = struct.Struct(f"!4s{_TAG_BYTES}s{_PROOF_BYTES}s{NONCE_BYTES}sHH")
_LENGTH = struct.Struct("!I")
_CHECKSUM = struct.Struct("!Q")
_MAX_GRANT_BYTES = 1 << 22
_PIECE_BYTES = 16 << 20

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


class FrameError(ConnectionError):
    """The other end does not speak this protocol, or what it sent is damaged."""


class Grant(msgspec.Struct, frozen=True):
    """The reply to a request.

    Attributes:
        error: Why nothing follows; empty if something does.
        leaves: Shape and dtype of each array.
    """

    error: str = ""
    leaves: list[tuple[list[Count], str]] = []


class Request(msgspec.Struct, frozen=True):
    """A request as it arrived.

    Attributes:
        tag: Names a publication.
        proof: To be compared with `prove`.
        nonce: The same for all streams of one pull.
        index: Which stream this is.
        count: How many there are.
    """

    tag: bytes
    proof: bytes
    nonce: bytes
    index: int
    count: int


def tag_of(key: int) -> bytes:
    """Returns the name of a publication on the wire; its id is not told."""
    return hashlib.blake2b(b"tag", key=key.to_bytes(8, "little"), digest_size=_TAG_BYTES).digest()


def prove(key: int, challenge: bytes, nonce: bytes, index: int, count: int) -> bytes:
    """Returns the proof of knowing `key`, for one stream of one pull on one connection."""
    text = challenge + nonce + struct.pack("!HH", index, count)
    secret = key.to_bytes(8, "little")
    return hashlib.blake2b(text, key=secret, digest_size=_PROOF_BYTES).digest()


def pack_request(key: int, challenge: bytes, nonce: bytes, index: int, count: int) -> bytes:
    """Returns the bytes of a request."""
    proof = prove(key, challenge, nonce, index, count)
    return _REQUEST.pack(_MAGIC, tag_of(key), proof, nonce, index, count)


def is_proven(request: Request, key: int, challenge: bytes) -> bool:
    """Returns whether a request proves its id, in constant time."""
    expected = prove(key, challenge, request.nonce, request.index, request.count)
    return hmac.compare_digest(expected, request.proof)


def read_request(peer: socket.socket) -> Request | None:
    """Reads a request.

    Args:
        peer: A connection on which the challenge was sent.

    Returns:
        The request, or None if the connection was closed instead.

    Raises:
        FrameError: If it is something else.
        OSError: If the connection fails or times out.
    """
    data = bytearray(_REQUEST.size)
    first = peer.recv_into(data)
    if first == 0:
        return None
    receive(peer, memoryview(data)[first:])
    magic, tag, proof, nonce, index, count = _REQUEST.unpack(data)
    if magic != _MAGIC or not index < count:
        raise FrameError("not a request of the tcp transfer engine")
    return Request(tag, proof, nonce, index, count)


def pack_grant(grant: Grant) -> bytes:
    """Returns the bytes of a grant."""
    body = msgspec.msgpack.encode(grant)
    return _LENGTH.pack(len(body)) + body


def read_grant(peer: socket.socket, check: Callable[[], None]) -> Grant:
    """Reads a grant.

    Args:
        peer: A connection on which a request was sent.
        check: Called now and then; raises to give up.

    Returns:
        The grant.

    Raises:
        FrameError: If it is something else.
        OSError: If the connection fails.
    """
    head = bytearray(_LENGTH.size)
    receive(peer, memoryview(head), check)
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_GRANT_BYTES:
        raise FrameError(f"a grant of {length} bytes")
    body = bytearray(length)
    receive(peer, memoryview(body), check)
    try:
        return msgspec.msgpack.decode(body, type=Grant)
    except msgspec.DecodeError as error:
        raise FrameError(f"not a grant: {error}") from error


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Places arrays one after the other.

    Args:
        sizes: Bytes of each.

    Returns:
        Where each starts, and the size of the whole; all multiples of `ALIGNMENT`.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def stream_parts(sizes: Sequence[int], index: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yields what one stream carries.

    Args:
        sizes: Bytes of each array.
        index: Which stream.
        count: How many streams.

    Yields:
        Array, first byte and end byte within it, in order.
    """
    starts, total = offsets(sizes)
    units = total // ALIGNMENT
    low, high = (units * at // count * ALIGNMENT for at in (index, index + 1))
    for leaf, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        begin, end = max(low - start, 0), min(high - start, size)
        if begin < end:
            yield leaf, begin, end


def checksum(data: Bytes) -> int:
    """Sums bytes as 64-bit words: as fast as memory, and sees lost, stale or damaged bytes.

    Args:
        data: 1-D, uint8, contiguous.

    Returns:
        The sum modulo 2**64.
    """
    whole = data.size // 8 * 8
    words = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    tail = int.from_bytes(data[whole:].tobytes(), "little")
    return (words + tail) & (2**64 - 1)


def send_parts(peer: socket.socket, arrays: Sequence[Bytes], index: int, count: int) -> None:
    """Sends one stream and its checksum.

    Args:
        peer: The connection.
        arrays: Each 1-D, uint8.
        index: Which stream.
        count: How many streams.

    Raises:
        OSError: If the connection fails or times out.
    """
    total = 0
    for leaf, begin, end in stream_parts([array.size for array in arrays], index, count):
        part = arrays[leaf][begin:end]
        total = (total + checksum(part)) & (2**64 - 1)
        for start in range(0, part.size, _PIECE_BYTES):
            peer.sendall(part[start : start + _PIECE_BYTES].data)
    peer.sendall(_CHECKSUM.pack(total))


def receive_parts(
    peer: socket.socket,
    arrays: Sequence[Bytes],
    index: int,
    count: int,
    check: Callable[[], None],
) -> None:
    """Receives one stream into place.

    Args:
        peer: The connection.
        arrays: Each 1-D, uint8; written to.
        index: Which stream.
        count: How many streams.
        check: Called now and then; raises to give up.

    Raises:
        FrameError: If the checksum differs.
        OSError: If the connection fails.
    """
    total = 0
    for leaf, begin, end in stream_parts([array.size for array in arrays], index, count):
        part = arrays[leaf][begin:end]
        receive(peer, part.data, check)
        total = (total + checksum(part)) & (2**64 - 1)
    tail = bytearray(_CHECKSUM.size)
    receive(peer, memoryview(tail), check)
    if _CHECKSUM.unpack(tail)[0] != total:
        raise FrameError(f"stream {index} of {count} arrived with a wrong checksum")


def set_timeouts(peer: socket.socket, receive_seconds: float, send_seconds: float) -> None:
    """Bounds how long a call on a connection may wait.

    Done in the kernel and not with `settimeout`, which would turn each call into many short ones:
    with several streams their threads then fight for the interpreter lock.

    Args:
        peer: The connection.
        receive_seconds: Longest wait for data.
        send_seconds: Longest wait for room.
    """
    peer.settimeout(None)
    for option, seconds in (
        (socket.SO_RCVTIMEO, receive_seconds),
        (socket.SO_SNDTIMEO, send_seconds),
    ):
        whole = int(seconds)
        value = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        peer.setsockopt(socket.SOL_SOCKET, option, value)


def receive(peer: socket.socket, into: memoryview, check: Callable[[], None] | None = None) -> None:
    """Fills a buffer.

    Args:
        peer: The connection, see `set_timeouts`.
        into: Where to.
        check: Called after each wait that found nothing; raises to give up.

    Raises:
        ConnectionError: If the connection is closed before the buffer is full.
        OSError: If it fails, or times out and there is no `check`.
    """
    done = 0
    while done < len(into):
        try:
            piece = into[done : done + _PIECE_BYTES]
            got = peer.recv_into(piece, len(piece), socket.MSG_WAITALL)
        except BlockingIOError:
            if check is None:
                raise
            check()
            continue
        if got == 0:
            raise ConnectionError(f"closed by the peer after {done} of {len(into)} bytes")
        done += got
        if check is not None:
            check()
