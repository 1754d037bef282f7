# SPDX-License-Identifier: Apache-2.0
"""The bytes that messages travel as.

One message is one ZMQ frame: a four-byte header (three of magic, one of protocol version), then
MessagePack of a tagged struct. The size of a frame is checked before it is parsed, and nothing can
run code while decoding.
"""

import msgspec

from kvferry.control.messages import Message

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20
# What a listening socket takes, and far more than any message that is meant for one.
MAX_REQUEST_BYTES = 1 << 20

_MAGIC = b"kvf"
_HEADER_BYTES = len(_MAGIC) + 1
# Made at import, so that a mistake in a message type is not taken for a malformed frame.
_DECODER = msgspec.msgpack.Decoder(Message)


class MessageError(ValueError):
    """Received bytes are not a message of this protocol.

    Attributes:
        kind: "oversize", "version" or "malformed"; names the counter that the receiver raises.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Turns a message into one frame.

    Args:
        message: What to send.
        max_bytes: Longest frame that peers take.

    Returns:
        The frame.

    Raises:
        MessageError: If the frame would be longer than `max_bytes` (kind "oversize").
    """
    frame = _MAGIC + bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(message)
    if len(frame) > max_bytes:
        raise MessageError(
            "oversize",
            f"{type(message).__name__} takes {len(frame)} bytes, the limit is {max_bytes}",
        )
    return frame


def decode(frame: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """Turns a received frame into a message.

    Args:
        frame: Bytes from a peer, of any content.
        max_bytes: Longest frame that is looked at.

    Returns:
        The message, every field within its bounds.

    Raises:
        MessageError: If the frame is too long, of another protocol version, or not a message.
    """
    if len(frame) > max_bytes:
        raise MessageError("oversize", f"frame of {len(frame)} bytes, the limit is {max_bytes}")
    if len(frame) < _HEADER_BYTES or not frame.startswith(_MAGIC):
        raise MessageError("malformed", f"frame of {len(frame)} bytes without the kvferry header")
    version = frame[len(_MAGIC)]
    if version != PROTOCOL_VERSION:
        raise MessageError(
            "version",
            f"the peer speaks protocol version {version}, this process speaks {PROTOCOL_VERSION};"
            " run the same kvferry release on both sides",
        )
    try:
        return _DECODER.decode(memoryview(frame)[_HEADER_BYTES:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # ValueError covers what __post_init__ of a layout refuses and undecodable text.
        raise MessageError("malformed", f"not a kvferry message: {error}") from error
