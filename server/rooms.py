# SPDX-License-Identifier: Apache-2.0
"""Gives every sequence of a request its own meeting: host, port and room.

A router names the meeting once per request, or once per prompt. Prefill and decode each expand it,
without talking to each other, so both must come to the same rooms: SGLang's rule for a single room
is `room + i` for the i-th sequence.
"""

from __future__ import annotations

from typing import TypeVar

from kvferry.engine.request import BootstrapInfo
from kvferry.server.errors import ApiError
from kvferry.server.fields import whole, whole_list
from kvferry.server.schemas import GenerateBody, Number, OpenAIBody

ROOM_LIMIT = 1 << 63

ItemT = TypeVar("ItemT")

# Offset between the rooms of the samples of one prompt when the router named one room per prompt:
# consecutive numbers could meet the neighbour's, an odd constant far from 0 and 2**63 does not.
_SAMPLE_STRIDE = 0x1E3779B97F4A7C15


def expand_bootstrap(
    body: GenerateBody | OpenAIBody, prompts: int, samples: int
) -> list[BootstrapInfo]:
    """Expands the bootstrap fields of a request to one meeting per sequence.

    Args:
      body: the request; each field is a scalar, or a list of one value per prompt or per sequence.
      prompts: number of prompts.
      samples: sequences per prompt (`n`).

    Returns:
      `prompts * samples` meetings with distinct rooms, the samples of a prompt side by side.

    Raises:
      ApiError: 400 if host or room is missing, a list has the wrong length, a value is out of
        range, or two sequences would share a room.
    """
    if body.bootstrap_host is None or body.bootstrap_room is None:
        missing = "bootstrap_host" if body.bootstrap_host is None else "bootstrap_room"
        raise ApiError(
            f"{missing} is missing: this server is half of a prefill/decode pair and serves only"
            " requests that come through its router; send the request to the router"
        )
    count = prompts * samples
    rooms = _rooms(body.bootstrap_room, prompts, samples)
    hosts = _spread("bootstrap_host", body.bootstrap_host, prompts, samples)
    if not all(hosts):
        raise ApiError("bootstrap_host is empty; give the address of the prefill server")
    ports: list[int | None] = [
        _port(port) for port in _spread("bootstrap_port", body.bootstrap_port, prompts, samples)
    ]
    if len(set(rooms)) != count:
        raise ApiError(
            f"bootstrap_room gives {len(set(rooms))} distinct rooms for {count} sequences"
        )
    return [
        BootstrapInfo(host, port, room)
        for host, port, room in zip(hosts, ports, rooms, strict=True)
    ]


def _rooms(value: Number | list[Number], prompts: int, samples: int) -> list[int]:
    count = prompts * samples
    if isinstance(value, list):
        given = whole_list("bootstrap_room", value)
    else:
        first = whole("bootstrap_room", value)
        assert first is not None
        given = (first,)
    for room in given:
        if not 0 <= room < ROOM_LIMIT:
            raise ApiError(f"bootstrap_room must be between 0 and 2**63-1, is {room}")
    if not isinstance(value, list):
        return [(given[0] + i) % ROOM_LIMIT for i in range(count)]
    if len(given) == count:
        return list(given)
    if len(given) == prompts:
        return [
            (room + sample * _SAMPLE_STRIDE) % ROOM_LIMIT
            for room in given
            for sample in range(samples)
        ]
    raise _wrong_length("bootstrap_room", len(given), prompts, samples)


def _spread(name: str, value: ItemT | list[ItemT], prompts: int, samples: int) -> list[ItemT]:
    if not isinstance(value, list):
        return [value] * (prompts * samples)
    if len(value) == prompts * samples:
        return list(value)
    if len(value) == prompts:
        return [item for item in value for _ in range(samples)]
    raise _wrong_length(name, len(value), prompts, samples)


def _port(value: Number | None) -> int | None:
    port = whole("bootstrap_port", value)
    if port is not None and not 0 < port < 65536:
        raise ApiError(f"bootstrap_port must be between 1 and 65535, is {port}")
    return port


def _wrong_length(name: str, length: int, prompts: int, samples: int) -> ApiError:
    return ApiError(
        f"{name} has {length} items for {prompts} prompts with {samples} samples each; give one"
        f" value, {prompts}, or {prompts * samples}"
    )
