# SPDX-License-Identifier: Apache-2.0
"""What fuzz tests of the connection let happen, in any order."""

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies

from kvferry.control.messages import Message
from kvferry.control.wire import encode


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that happens; what its numbers mean depends on what it is."""

    name: str
    who: int
    room: int
    number: int
    frames: tuple[bytes, ...] = ()


def steps_of(names: Sequence[str], most: int) -> strategies.SearchStrategy[list[Step]]:
    """Returns lists of at most that many steps: those named, good ones ("go on"), any frames."""
    small = strategies.integers(0, 2)
    some = strategies.builds(
        Step, strategies.sampled_from(names), small, small, strategies.integers(0, 5)
    )
    frames = strategies.lists(strategies.binary(max_size=40), min_size=1, max_size=4).map(tuple)
    rubbish = strategies.builds(Step, strategies.just("frames"), small, small, small, frames)
    on = strategies.builds(Step, strategies.just("go on"), small, small, small)
    either = strategies.one_of(on, on, on, on, some, some, rubbish)
    return strategies.lists(either, min_size=most // 4, max_size=most)


def broken(message: Message, number: int) -> bytes:
    """Returns a message with one bit changed."""
    frame = bytearray(encode(message))
    frame[number * 7 % len(frame)] ^= 1 << number
    return bytes(frame)
