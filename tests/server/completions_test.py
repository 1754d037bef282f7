# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from kvferry.engine.request import FinishReason
from kvferry.tests.server.running import Running, serving_script
from kvferry.tests.server.scripted import MAX_CONTEXT, Piece, ScriptedScheduler, expected_text

_MEETING = {"bootstrap_host": "127.0.0.1", "bootstrap_port": None, "bootstrap_room": 5}


def _ask(running: Running, **fields: Any) -> Any:
    answer = running.post("/v1/completions", fields)
    assert answer.status == 200, answer.body
    return answer.json


def _stream(running: Running, **fields: Any) -> list[Any]:
    return running.post("/v1/completions", {**fields, "stream": True}).events


def test_one_text(plain: Running) -> None:
    answer = _ask(plain, prompt="abc", max_tokens=4, model="whatever")
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "text": "defg",
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("abc", [3]),
        (["abc"], [3]),
        (["a", "bb"], [1, 2]),
        ([1, 2, 3, 4], [4]),
        ([[1, 2.0], [3]], [2, 1]),
    ],
)
def test_forms_of_a_prompt(plain: Running, prompt: Any, lengths: list[int]) -> None:
    answer = _ask(plain, prompt=prompt, max_tokens=3)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [expected_text(" " * length, 3) for length in lengths]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(lengths)))
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 3 * len(lengths)


def test_samples_count_their_prompt_once(plain: Running) -> None:
    answer = _ask(plain, prompt=["abc", "d"], max_tokens=2, n=3, best_of=3)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 12


def test_default_length(plain: Running) -> None:
    assert _ask(plain, prompt="abc")["usage"]["completion_tokens"] == 16
    long = "x" * (MAX_CONTEXT - 3)
    assert _ask(plain, prompt=long)["usage"]["completion_tokens"] == 3


def test_a_rid_survives(plain: Running) -> None:
    assert _ask(plain, prompt="abc", rid="mine")["id"] == "cmpl-mine"


def test_stop_reason() -> None:
    pieces = [Piece(97, finish=FinishReason("stop", "end"))]
    with serving_script(ScriptedScheduler(lambda request: iter(pieces))) as running:
        (choice,) = _ask(running, prompt="abc")["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "end")


def test_stream_joins_to_the_whole(plain: Running) -> None:
    events = _stream(plain, prompt="abc", max_tokens=6)
    assert "".join(event["choices"][0]["text"] for event in events) == expected_text("abc", 6)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1
    assert all(event["usage"] is None for event in events)
    assert {event["object"] for event in events} == {"text_completion"}


def test_stream_with_usage(plain: Running) -> None:
    events = _stream(plain, prompt="abc", max_tokens=6, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 9


def test_stream_of_a_batch(plain: Running) -> None:
    events = _stream(plain, prompt=["a", "bb"], max_tokens=4, n=2)
    for index, prompt in enumerate(("a", "a", "bb", "bb")):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == expected_text(prompt, 4)
        assert choices[-1]["finish_reason"] == "length"


def test_echo(plain: Running) -> None:
    assert _ask(plain, prompt="abc", max_tokens=2, echo=True)["choices"][0]["text"] == "abcde"
    ids = _ask(plain, prompt=[97, 98], max_tokens=1, echo=True)
    assert ids["choices"][0]["text"] == "abc"
    both = _ask(plain, prompt=["a", "bb"], max_tokens=1, echo=True, n=2)
    assert [choice["text"] for choice in both["choices"]] == ["ab", "ab", "bbc", "bbc"]
    events = _stream(plain, prompt="abc", max_tokens=3, echo=True)
    assert "".join(event["choices"][0]["text"] for event in events) == "abcdef"


def test_logprobs(plain: Running) -> None:
    (choice,) = _ask(plain, prompt="abc", max_tokens=2, logprobs=2)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["d", "e"],
        "token_logprobs": [-1.0, -1.01],
        "top_logprobs": [{"d": -1.0, "e": -2.0}, {"e": -1.01, "f": -2.01}],
        "text_offset": [0, 1],
    }


def test_logprobs_without_alternatives(plain: Running) -> None:
    (choice,) = _ask(plain, prompt="abc", max_tokens=1, logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0]
    assert choice["logprobs"]["top_logprobs"] is None


def test_logprobs_with_echo_begin_with_the_prompt(plain: Running) -> None:
    (choice,) = _ask(plain, prompt="abc", max_tokens=1, logprobs=1, echo=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.98, -0.99, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_logprobs_in_a_stream_add_up(plain: Running) -> None:
    events = _stream(plain, prompt="abc", max_tokens=5, logprobs=1)
    parts = [event["choices"][0]["logprobs"] for event in events]
    (whole,) = _ask(plain, prompt="abc", max_tokens=5, logprobs=1)["choices"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert sum((part[name] for part in parts), []) == whole["logprobs"][name]


def test_a_pair_refuses_echo_with_logprobs(decode_side: Running, prefill_side: Running) -> None:
    body = {**_MEETING, "prompt": "abc", "echo": True, "logprobs": 1}
    answers = [side.post("/v1/completions", body) for side in (decode_side, prefill_side)]
    assert [answer.status for answer in answers] == [400, 400]
    assert answers[0].message == answers[1].message
    assert "POST /generate" in answers[0].message


def test_one_scalar_room_for_a_batch(decode_side: Running) -> None:
    _ask(decode_side, **_MEETING, prompt=["a", "b"], n=2, max_tokens=1)
    scheduler = decode_side.service.scheduler
    assert isinstance(scheduler, ScriptedScheduler)
    meetings = [request.bootstrap for request in scheduler.submitted[-4:]]
    assert [m.room for m in meetings if m is not None] == [5, 6, 7, 8]
    assert {m.port for m in meetings if m is not None} == {None}


def test_prefill_gives_one_token(prefill_side: Running) -> None:
    answer = _ask(prefill_side, **_MEETING, prompt="abc", max_tokens=9, min_tokens=3)
    assert answer["choices"][0]["text"] == "d"
    assert answer["usage"]["completion_tokens"] == 1
