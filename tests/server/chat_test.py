# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from kvferry.engine.request import FinishReason
from kvferry.tests.server.running import Running, serving_script
from kvferry.tests.server.scripted import Piece, ScriptedScheduler, expected_text

_MESSAGES = [{"role": "user", "content": "hi"}]
_PROMPT = "<user>hi<assistant>"


def _ask(running: Running, **fields: Any) -> Any:
    answer = running.post("/v1/chat/completions", {"messages": _MESSAGES, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def _stream(running: Running, **fields: Any) -> list[Any]:
    body = {"messages": _MESSAGES, **fields, "stream": True}
    return running.post("/v1/chat/completions", body).events


def test_one_answer(plain: Running) -> None:
    answer = _ask(plain, max_tokens=4, model=None)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": expected_text(_PROMPT, 4),
                    "reasoning_content": None,
                    "tool_calls": None,
                },
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(_PROMPT),
            "completion_tokens": 4,
            "total_tokens": len(_PROMPT) + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_both_names_of_the_length(plain: Running) -> None:
    assert _ask(plain, max_completion_tokens=3.0)["usage"]["completion_tokens"] == 3
    both = _ask(plain, max_tokens=9, max_completion_tokens=2)
    assert both["usage"]["completion_tokens"] == 2


def test_without_a_length_the_engine_decides(plain: Running) -> None:
    assert _ask(plain)["usage"]["completion_tokens"] == 200  # the script's own limit


def test_what_a_router_adds_is_accepted(plain: Running) -> None:
    added = {
        "model": "unknown",
        "logprobs": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "user": None,
        "tools": None,
    }
    assert _ask(plain, max_completion_tokens=2, **added)["usage"]["completion_tokens"] == 2


def test_samples(plain: Running) -> None:
    answer = _ask(plain, max_tokens=2, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == len(_PROMPT)
    assert answer["usage"]["completion_tokens"] == 6


def test_stream(plain: Running) -> None:
    events = _stream(plain, max_tokens=5)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == expected_text(_PROMPT, 5)
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all(event["usage"] is None for event in events)


def test_stream_with_usage(plain: Running) -> None:
    events = _stream(plain, max_tokens=5, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_stream_of_samples(plain: Running) -> None:
    events = _stream(plain, max_tokens=4, n=2)
    for index in (0, 1):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == expected_text(_PROMPT, 4)
        assert choices[-1]["finish_reason"] == "length"


def test_stop_reason() -> None:
    def pieces() -> list[Piece]:
        return [Piece(97), Piece(259, "", FinishReason("stop", 259))]

    with serving_script(ScriptedScheduler(lambda request: iter(pieces()))) as running:
        (choice,) = _ask(running)["choices"]
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", 259)
        assert choice["message"]["content"] == "a"
        last = _stream(running)[-1]["choices"][0]
    assert (last["finish_reason"], last["matched_stop"], last["delta"]) == ("stop", 259, {})


def test_logprobs(plain: Running) -> None:
    (choice,) = _ask(plain, max_tokens=1, logprobs=True, top_logprobs=2)["choices"]
    (entry,) = choice["logprobs"]["content"]
    token = ord(expected_text(_PROMPT, 1))
    assert entry["token"] == chr(token) and entry["bytes"] == [token]
    assert entry["logprob"] == -token / 100
    assert [top["token"] for top in entry["top_logprobs"]] == [chr(token), chr(token + 1)]


def test_logprobs_in_a_stream_add_up(plain: Running) -> None:
    events = _stream(plain, max_tokens=6, logprobs=True)
    parts = [event["choices"][0]["logprobs"] for event in events]
    entries = [entry for part in parts if part is not None for entry in part["content"]]
    (choice,) = _ask(plain, max_tokens=6, logprobs=True)["choices"]
    assert entries == choice["logprobs"]["content"]


def test_logprobs_of_tokens_without_text_are_not_lost() -> None:
    def pieces() -> list[Piece]:
        return [Piece(0xC3, ""), Piece(0xA9, "é"), Piece(259, "", FinishReason("stop", 259))]

    with serving_script(ScriptedScheduler(lambda request: iter(pieces()))) as running:
        events = _stream(running, logprobs=True)
    parts = [event["choices"][0]["logprobs"] for event in events]
    tokens = [entry["bytes"] for part in parts if part is not None for entry in part["content"]]
    assert tokens == [[0xC3], [0xA9], []]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages is empty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, is 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens must be at least 1, is -1"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be at most 20, is 21"),
        ({"tool_choice": "required"}, "tool_choice 'required' is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format 'json_object'"),
        ({"temperature": 3}, "temperature must be between 0 and 2, is 3"),
        ({"messages": [{"role": "forbidden", "content": ""}]}, "chat template refused"),
        ({"messages": [{"content": "x"}]}, "missing required field `role`"),
    ],
)
def test_refusals(plain: Running, fields: dict[str, Any], message: str) -> None:
    answer = plain.post("/v1/chat/completions", {"messages": _MESSAGES, **fields})
    assert answer.status == 400
    assert message in answer.message
    assert answer.json["error"]["type"] == "BadRequestError"
