# SPDX-License-Identifier: Apache-2.0
"""What travels on a connection of the tcp engine.

The listening side opens with a random challenge. The pulling side answers with a request: a tag
that names the publication, a proof that it knows the id (a digest keyed with it over the
challenge), and which of how many streams this connection carries. The listening side replies with
a grant: an error, or the shapes and dtypes of the arrays. Then come the bytes of the stream and an
end mark. After that the connection is ready for another challenge.

All arrays of a publication lie one after the other, each at a multiple of 64 bytes, so that the
receiver can hand them to JAX without a copy; stream i of n carries the i-th part of that, gaps
included, so that it is received in as few calls as possible.

The shm and zmq engines use the same names, proofs and placement of arrays.

There is no checksum here: TCP has one, and one that sees more than the way between two sockets is
computed over the pages themselves (verified_pages.py).
"""

import collections
import hashlib
import hmac
import itertools
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeAlias

import jax
import msgspec
import numpy as np

from kvferry.control.engines.base import Spec

ALIGNMENT = 64
CHALLENGE_BYTES = 16
NONCE_BYTES = 16

_MAGIC = b"kvT2"
_TAG_BYTES = 16
_PROOF_BYTES = 32
_REQUEST = struct.Struct(f"!4s{_TAG_BYTES}s{_PROOF_BYTES}s{NONCE_BYTES}sHH")
_LENGTH = struct.Struct("!I")
_END = struct.Struct("!4sHQ")
_END_MAGIC = b"end."
END_BYTES = _END.size
GRANT_HEAD_BYTES = _LENGTH.size
_GAP = bytes(ALIGNMENT)
_MAX_PIECES = 512  # Linux takes 1024.
_MAX_GRANT_BYTES = 1 << 22
_PIECE_BYTES = 16 << 20

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Leaf: TypeAlias = tuple[tuple[Count, ...], str]
Check: TypeAlias = Callable[[int], None]
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
    leaves: list[Leaf] = []


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
    # One call, so that its time limit holds for the request and not for each byte of it.
    got = peer.recv_into(data, len(data), socket.MSG_WAITALL)
    if got == 0:
        return None
    if got < len(data):
        raise FrameError(f"{got} of {len(data)} bytes of a request")
    magic, tag, proof, nonce, index, count = _REQUEST.unpack(data)
    if magic != _MAGIC or not index < count:
        raise FrameError("not a request of the tcp transfer engine")
    return Request(tag, proof, nonce, index, count)


def leaves_of(arrays: Sequence[jax.Array] | Sequence[Spec]) -> list[Leaf]:
    """Returns shape and dtype of each array, as in a grant."""
    names: dict[np.dtype, str] = {}  # To write one out takes a microsecond.
    return [
        (array.shape, names.get(array.dtype) or names.setdefault(array.dtype, str(array.dtype)))
        for array in arrays
    ]


def pack_grant(grant: Grant) -> bytes:
    """Returns the bytes of a grant."""
    body = msgspec.msgpack.encode(grant)
    return _LENGTH.pack(len(body)) + body


def read_grant(peer: socket.socket, check: Check) -> Grant:
    """Reads a grant.

    Args:
        peer: A connection on which a request was sent.
        check: As for `receive`.

    Returns:
        The grant.

    Raises:
        FrameError: If it is something else.
        OSError: If the connection fails.
    """
    head = bytearray(GRANT_HEAD_BYTES)
    receive(peer, memoryview(head), check)
    body = bytearray(grant_length(head))
    receive(peer, memoryview(body), check)
    return unpack_grant(body)


def grant_length(head: bytearray) -> int:
    """Returns the size of what follows the first `GRANT_HEAD_BYTES` of a grant.

    Raises:
        FrameError: If it cannot be one.
    """
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_GRANT_BYTES:
        raise FrameError(f"a grant of {length} bytes")
    return int(length)


def unpack_grant(body: bytearray) -> Grant:
    """Returns a grant.

    Raises:
        FrameError: If it is something else.
    """
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


def stream_range(total: int, index: int, count: int) -> tuple[int, int]:
    """Returns the first byte and the end of what one stream carries.

    Args:
        total: Bytes in all, a multiple of `ALIGNMENT`.
        index: Which stream.
        count: How many streams.
    """
    units = total // ALIGNMENT
    return units * index // count * ALIGNMENT, units * (index + 1) // count * ALIGNMENT


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
    low, high = stream_range(total, index, count)
    for leaf, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        begin, end = max(low - start, 0), min(high - start, size)
        if begin < end:
            yield leaf, begin, end


def send_parts(
    peer: socket.socket, head: bytes, arrays: Sequence[Bytes], index: int, count: int
) -> None:
    """Sends a grant, its stream and the end mark.

    Args:
        peer: The connection.
        head: The grant; with the bytes in one call, since the receiver wakes up for each.
        arrays: Each 1-D, uint8.
        index: Which stream.
        count: How many streams.

    Raises:
        OSError: If the connection fails or times out.
    """
    sizes = [array.size for array in arrays]
    low, high = stream_range(offsets(sizes)[1], index, count)
    views = [memoryview(head)]
    for leaf, begin, end in stream_parts(sizes, index, count):
        views.append(arrays[leaf][begin:end].data)
        if end == sizes[leaf] and end % ALIGNMENT:
            views.append(memoryview(_GAP)[: -end % ALIGNMENT])
    views.append(memoryview(_END.pack(_END_MAGIC, index, high - low)))
    send_views(peer, views)


def send_views(peer: socket.socket, views: Sequence[memoryview]) -> None:
    """Sends pieces of memory one after the other, many in one call.

    Args:
        peer: The connection.
        views: The pieces, in bytes.

    Raises:
        OSError: If the connection fails or times out.
    """
    waiting = collections.deque(views)
    while waiting:
        sent = peer.sendmsg(list(itertools.islice(waiting, _MAX_PIECES)))
        while sent:
            first = waiting.popleft()
            if len(first) > sent:
                waiting.appendleft(first[sent:])
            sent -= min(sent, len(first))


def receive_part(peer: socket.socket, memory: Bytes, index: int, count: int, check: Check) -> None:
    """Receives one stream into place.

    Args:
        peer: The connection.
        memory: 1-D, uint8, for all arrays as in `offsets`; written to.
        index: Which stream.
        count: How many streams.
        check: As for `receive`.

    Raises:
        FrameError: If its end is not where it should be.
        OSError: If the connection fails.
    """
    low, high = stream_range(memory.size, index, count)
    receive(peer, memory[low:high].data, check)
    tail = bytearray(END_BYTES)
    receive(peer, memoryview(tail), check)
    check_end(tail, index, high - low)


def check_end(tail: bytearray, index: int, num_bytes: int) -> None:
    """Checks the end mark of a stream.

    Raises:
        FrameError: If it is something else.
    """
    if _END.unpack(tail) != (_END_MAGIC, index, num_bytes):
        raise FrameError(f"stream {index} has no end mark after {num_bytes} bytes")


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


def receive(peer: socket.socket, into: memoryview, check: Check | None = None) -> None:
    """Fills a buffer.

    Args:
        peer: The connection, see `set_timeouts`.
        into: Where to.
        check: Called with the bytes that each wait has brought, 0 included; raises to give up.

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
            check(0)
            continue
        if got == 0:
            raise ConnectionError(f"closed by the peer after {done} of {len(into)} bytes")
        done += got
        if check is not None:
            check(got)
