# SPDX-License-Identifier: Apache-2.0
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from kvferry.server.errors import ApiError
from kvferry.server.rooms import ROOM_LIMIT, expand_bootstrap
from kvferry.server.schemas import GenerateBody


def _body(room: Any, host: Any = "10.0.0.1", port: Any = 8998) -> GenerateBody:
    return GenerateBody(bootstrap_host=host, bootstrap_port=port, bootstrap_room=room)


def _rooms(body: GenerateBody, prompts: int, samples: int) -> list[int]:
    return [meeting.room for meeting in expand_bootstrap(body, prompts, samples)]


def test_one_sequence() -> None:
    (meeting,) = expand_bootstrap(_body(5), 1, 1)
    assert (meeting.host, meeting.port, meeting.room) == ("10.0.0.1", 8998, 5)


def test_a_list_of_one_is_one_sequence() -> None:
    (meeting,) = expand_bootstrap(_body([5], ["10.0.0.1"], [8998]), 1, 1)
    assert (meeting.host, meeting.port, meeting.room) == ("10.0.0.1", 8998, 5)


def test_a_router_without_a_port_sends_null() -> None:
    assert expand_bootstrap(_body(5, port=None), 1, 1)[0].port is None
    meetings = expand_bootstrap(_body([5, 6], ["a", "b"], [None, 8998]), 2, 1)
    assert [meeting.port for meeting in meetings] == [None, 8998]


def test_a_room_survives_in_full() -> None:
    assert _rooms(_body(ROOM_LIMIT - 1), 1, 1) == [ROOM_LIMIT - 1]


def test_scalar_counts_up_over_prompts_and_samples() -> None:
    assert _rooms(_body(5), 2, 3) == [5, 6, 7, 8, 9, 10]


def test_scalar_wraps_at_the_limit() -> None:
    assert _rooms(_body(ROOM_LIMIT - 1), 1, 2) == [ROOM_LIMIT - 1, 0]


def test_list_of_sequences_is_taken_as_it_is() -> None:
    meetings = expand_bootstrap(_body([9, 7, 5, 3], ["a", "b", "c", "d"], [1, 2, 3, 4]), 2, 2)
    assert [(m.host, m.port, m.room) for m in meetings] == [
        ("a", 1, 9),
        ("b", 2, 7),
        ("c", 3, 5),
        ("d", 4, 3),
    ]


def test_list_of_prompts_is_spread_over_samples() -> None:
    meetings = expand_bootstrap(_body([5, 6], ["a", "b"], [1, 2]), 2, 2)
    assert [(m.host, m.port) for m in meetings] == [("a", 1), ("a", 1), ("b", 2), ("b", 2)]
    rooms = [m.room for m in meetings]
    assert rooms[0] == 5 and rooms[2] == 6
    assert len(set(rooms)) == 4


@hypothesis.given(
    strategies.lists(strategies.integers(0, ROOM_LIMIT - 1), min_size=1, max_size=5, unique=True),
    strategies.integers(1, 5),
)
def test_both_sides_come_to_the_same_distinct_rooms(given: list[int], samples: int) -> None:
    one = _rooms(_body(given), len(given), samples)
    other = _rooms(_body(list(given)), len(given), samples)
    assert one == other
    assert len(set(one)) == len(given) * samples
    assert all(0 <= room < ROOM_LIMIT for room in one)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_body(None), "bootstrap_room is missing: .* send the request to the router"),
        (_body(1, host=None), "bootstrap_host is missing"),
        (_body(1, host=""), "bootstrap_host is empty"),
        (_body(-1), r"bootstrap_room must be between 0 and 2\*\*63-1, is -1"),
        (_body(ROOM_LIMIT), "bootstrap_room must be between"),
        (_body(1.5), "bootstrap_room must be a whole number"),
        (_body([1, 1]), "1 distinct rooms for 2 sequences"),
        (_body([1, 2, 3]), "bootstrap_room has 3 items for 2 prompts"),
        (_body([]), "bootstrap_room has 0 items"),
        (_body(1, host=["a", "b", "c"]), "bootstrap_host has 3 items"),
        (_body(1, port=0), "bootstrap_port must be between 1 and 65535, is 0"),
        (_body(1, port=65536), "bootstrap_port must be between"),
    ],
)
def test_refusals(body: GenerateBody, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        expand_bootstrap(body, 2, 1)
    assert caught.value.status == 400
