# SPDX-License-Identifier: Apache-2.0
"""Reads a request body within its limits and decodes it into a typed struct.

FastAPI's own validation is not used: it answers 422, which a router turns into a retried 500.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from kvferry.server.errors import ApiError

# A client that stops sending for this long, in the middle of a body, is answered 400.
BODY_PAUSE_SECONDS = 30.0

# An oversized body is read to its end up to this many times the limit, and thrown away: an answer
# before the end of the body makes many clients report a broken pipe instead of the 400.
DISCARD_FACTOR = 16

StructT = TypeVar("StructT", bound=msgspec.Struct)


async def read_body(
    request: Request, max_bytes: int, pause_seconds: float = BODY_PAUSE_SECONDS
) -> bytes:
    """Reads a whole request body.

    Args:
      request: the request.
      max_bytes: the longest body that is accepted.
      pause_seconds: the longest pause between two pieces of it.

    Returns:
      The body.

    Raises:
      ApiError: 400 if the body is longer than `max_bytes`, ends early or stalls.
    """
    parts: list[bytes] = []
    size = 0
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(pause_seconds) as deadline:
            async for part in request.stream():
                deadline.reschedule(now() + pause_seconds)
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                elif size > max_bytes * DISCARD_FACTOR:
                    break
    except TimeoutError as error:
        raise ApiError(
            f"the request body stalled for {pause_seconds:g} s after {size} bytes; send it whole"
        ) from error
    except ClientDisconnect as error:
        raise ApiError(f"the request body ended after {size} bytes") from error
    if size > max_bytes:
        raise ApiError(
            f"the request body has more than {max_bytes} bytes, the limit of this server; send a"
            " shorter one or raise --max_body_bytes"
        )
    return b"".join(parts)


def decode(decoder: msgspec.json.Decoder[StructT], raw: bytes) -> StructT:
    """Decodes a JSON body.

    Args:
      decoder: decoder of the wanted struct.
      raw: the body.

    Returns:
      The struct; unknown keys are ignored.

    Raises:
      ApiError: 400 if the body is not JSON, not UTF-8, or a value has the wrong type.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise ApiError(f"invalid request body: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"invalid request body: it is not JSON: {error}") from error
    except RecursionError as error:
        raise ApiError("invalid request body: it is nested too deeply") from error
