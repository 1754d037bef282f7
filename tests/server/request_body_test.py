# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from kvferry.server.errors import ApiError
from kvferry.server.request_body import DISCARD_FACTOR, decode, read_body
from kvferry.server.schemas import GenerateBody

_DECODER = msgspec.json.Decoder(GenerateBody)


class _Sender:
    """Sends the pieces of a body, then falls silent."""

    def __init__(self, parts: Sequence[bytes], end: str = "complete"):
        self.parts = list(parts)
        self.end = end
        self.asked = 0

    async def __call__(self) -> dict[str, Any]:
        self.asked += 1
        if self.parts:
            more = len(self.parts) > 1 or self.end != "complete"
            return {"type": "http.request", "body": self.parts.pop(0), "more_body": more}
        if self.end == "leave":
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()
        raise AssertionError("not reached")


def _read(sender: _Sender, max_bytes: int = 10, pause_seconds: float = 20.0) -> bytes:
    request = Request({"type": "http", "method": "POST", "headers": []}, sender)
    return asyncio.run(read_body(request, max_bytes, pause_seconds))


def test_parts_are_joined() -> None:
    assert _read(_Sender([b"abc", b"def"])) == b"abcdef"
    assert _read(_Sender([b"0123456789"])) == b"0123456789"


def test_a_body_over_the_limit_is_read_to_its_end() -> None:
    sender = _Sender([b"0123456789"] * 5)
    with pytest.raises(ApiError, match="more than 10 bytes, the limit") as caught:
        _read(sender)
    assert caught.value.status == 400
    assert not sender.parts


def test_a_body_far_over_the_limit_is_not() -> None:
    sender = _Sender([b"0123456789"] * (DISCARD_FACTOR * 10))
    with pytest.raises(ApiError, match="more than 10 bytes"):
        _read(sender)
    assert len(sender.parts) > DISCARD_FACTOR * 8


def test_a_client_that_leaves() -> None:
    with pytest.raises(ApiError, match="ended after 3 bytes"):
        _read(_Sender([b"abc"], end="leave"))


def test_a_client_that_stalls() -> None:
    with pytest.raises(ApiError, match=r"stalled for 0\.05 s after 3 bytes"):
        _read(_Sender([b"abc"], end="stall"), pause_seconds=0.05)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"nonsense", "malformed"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"text":"\xff\xfe"}', "(?i:utf-8)"),
        (b'{"text":"\\ud800"}', ""),
        (b'{"text":5}', r"got `int` - at `\$.text`"),
        (b'{"input_ids":"x"}', r"at `\$.input_ids`"),
        (b'{"input_ids":[true]}', r"at `\$.input_ids"),
        (b'{"sampling_params":{"max_new_tokens":"x"}}', r"at `\$.sampling_params"),
        (b'{"sampling_params":{"temperature":NaN}}', "malformed"),
        (b'{"sampling_params":{"temperature":1e999}}', "out of range"),
        (b'{"stream":1}', r"at `\$.stream`"),
        (b'{"zzz":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_bodies_are_400(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError, match="^invalid request body: .*" + message) as caught:
        decode(_DECODER, raw)
    assert caught.value.status == 400


def test_unknown_keys_and_nulls_are_ignored() -> None:
    body = decode(_DECODER, b'{"zzz":{"a":[1]},"text":"x","stream":null,"rid":null}')
    assert body == GenerateBody(text="x")
