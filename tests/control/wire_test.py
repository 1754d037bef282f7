# SPDX-License-Identifier: Apache-2.0
"""Messages and their bytes: what is not a valid message is refused and never a crash."""

import inspect
from typing import Any, get_args

import hypothesis
import msgspec
import pytest
from hypothesis import strategies

from kvferry.control import messages
from kvferry.control.messages import (
    EngineInfo,
    Instance,
    KVChunk,
    KVMetadata,
    Leaf,
    Message,
    Ping,
    clip_reason,
)
from kvferry.control.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, MessageError, decode, encode
from kvferry.tests.control.pairs import LAYOUT

HEADER = b"kvf" + bytes([PROTOCOL_VERSION])
INSTANCE = Instance(
    instance_id="i" * 32,
    generation=5,
    role="prefill",
    host="127.0.0.1",
    side_channel_port=9600,
    layout=LAYOUT,
    engine=EngineInfo(name="jax", address="127.0.0.1:9100", settings={"channels": 4}),
)
VALUES: dict[str, Any] = {
    "instance": INSTANCE,
    "metadata": KVMetadata(first_token=1, prompt_tokens=2, extra={"a": [1, b"x", None]}),
    "leaves": [Leaf((1, 2, 3), "uint16")],
    "reason": "because",
    "status": 503,
    "lease_seconds": 3.0,
    "timeout_seconds": 3600.0,
    "known": True,
    "last": True,
    "rooms": [0, (1 << 63) - 1],
    "transfer_ids": [1, 2],
    "extra": {"limit": 3, "name": "x", "share": 0.5, "flag": True},
    "instance_id": "i" * 32,
    "room": (1 << 63) - 1,
}
EVERY: list[Message] = [
    kind(**{name: VALUES.get(name, 3) for name in kind.__struct_fields__})
    for kind in get_args(Message)
]


def test_every_message_class_is_in_the_union() -> None:
    base = messages.Ping.__mro__[1]
    classes = {
        each
        for _, each in inspect.getmembers(messages, inspect.isclass)
        if issubclass(each, base) and each is not base
    }
    assert classes == set(get_args(Message))


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_trip(message: Message) -> None:
    assert decode(encode(message)) == message


def wrap(value: Any) -> bytes:
    return HEADER + msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"kvf",
        b"\x00" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER,
        HEADER + b"\xc1",
        HEADER + b"\xff" * 50,
        wrap(None),
        wrap([]),
        wrap({}),
        wrap({"t": "NoSuchMessage"}),
        wrap({"t": "Lookup"}),
        wrap({"t": "Lookup", "query": 1, "room": -1}),
        wrap({"t": "Lookup", "query": 1, "room": 1 << 63}),
        wrap({"t": "Lookup", "query": 1, "room": 1.5}),
        wrap({"t": "Lookup", "query": "1", "room": 1}),
        wrap({"t": "KVChunkDone", "transfer_id": 1 << 53, "room": 1, "sequence": 0}),
        wrap({"t": "KVFailed", "transfer_id": 1, "reason": "x", "status": 200}),
        wrap({"t": "KVFailed", "transfer_id": 1, "reason": "x" * 5000, "status": 503}),
        wrap({"t": "Registered", "lease_seconds": float("nan")}),
        wrap({"t": "Registered", "lease_seconds": -1.0}),
        wrap({"t": "Announce", "instance_id": "i", "rooms": list(range(70000))}),
        HEADER + b"\x81\xa1t\xa4\xff\xff\xff\xff",
        HEADER + b"\x91" * 4000,
    ],
)
def test_malformed_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(MessageError) as caught:
        decode(frame)
    assert caught.value.kind == "malformed"


def test_a_layout_with_bad_values_is_refused() -> None:
    raw = msgspec.to_builtins(messages.Hello(instance=INSTANCE))
    raw["instance"]["layout"]["page_size"] = 0
    with pytest.raises(MessageError, match="page_size"):
        decode(wrap(raw))


def test_another_version_is_named() -> None:
    with pytest.raises(MessageError, match="version 9") as caught:
        decode(b"kvf\x09" + encode(Ping())[4:])
    assert caught.value.kind == "version"
    assert str(PROTOCOL_VERSION) in str(caught.value)


def test_sizes_are_limited_both_ways() -> None:
    with pytest.raises(MessageError, match="limit") as caught:
        decode(b"x" * (MAX_MESSAGE_BYTES + 1))
    assert caught.value.kind == "oversize"
    chunk = KVChunk(transfer_id=1, sequence=0, key=1, first_page=0, num_pages=1)
    with pytest.raises(MessageError, match="KVChunk takes") as caught:
        encode(chunk, max_bytes=20)
    assert caught.value.kind == "oversize"


def test_unknown_fields_of_a_later_version_are_skipped() -> None:
    raw = msgspec.to_builtins(messages.KVAccept(transfer_id=4))
    assert decode(wrap({**raw, "new_field": {"a": 1}})) == messages.KVAccept(transfer_id=4)


def test_reasons_are_cut_and_valid() -> None:
    assert clip_reason("short") == "short"
    assert len(clip_reason("x" * 10_000)) == messages.REASON_LIMIT
    failed = messages.KVFailed(transfer_id=1, reason=clip_reason("\ud800"), status=503)
    assert decode(encode(failed)) == messages.KVFailed(transfer_id=1, reason="?", status=503)


@hypothesis.settings(max_examples=300)
@hypothesis.given(strategies.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(body: bytes) -> None:
    for frame in (body, HEADER + body):
        try:
            decode(frame)
        except MessageError as error:
            assert error.kind in ("malformed", "version", "oversize")


@hypothesis.settings(max_examples=300)
@hypothesis.given(strategies.sampled_from(EVERY), strategies.data())
def test_damaged_messages_are_a_message_or_an_error(
    message: Message, data: strategies.DataObject
) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(strategies.integers(1, 4))):
        position = data.draw(strategies.integers(0, len(frame) - 1))
        frame[position] = data.draw(strategies.integers(0, 255))
    cut = data.draw(strategies.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            decode(damaged)
        except MessageError:
            pass
