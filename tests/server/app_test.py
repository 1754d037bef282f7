# SPDX-License-Identifier: Apache-2.0
"""Forms of errors, request ids, and every kind of bad input on every route and role."""

import json
import time
from typing import Any

import pytest

from kvferry.server.service import ServiceHooks
from kvferry.tests.server.running import Answer, Running, serving_script
from kvferry.tests.server.scripted import MAX_CONTEXT, VOCAB_SIZE, ScriptedScheduler

_MEETING = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
_USER = [{"role": "user", "content": "hi"}]
_BIG = 5_000_000


def _generate(**fields: Any) -> bytes:
    return json.dumps({**_MEETING, **fields}).encode()


def _params(**fields: Any) -> bytes:
    return _generate(text="abc", sampling_params=fields)


def _completion(**fields: Any) -> bytes:
    return json.dumps({**_MEETING, "prompt": "abc", **fields}).encode()


def _chat(**fields: Any) -> bytes:
    return json.dumps({**_MEETING, "messages": _USER, **fields}).encode()


_BAD_GENERATE = {
    "empty body": b"",
    "cut JSON": b'{"text": ',
    "not an object": b"[1]",
    "invalid UTF-8": b'{"text":"\xc3\x28"}',
    "lone surrogate": b'{"text":"\\ud800"}',
    "deep nesting": b'{"text":' + b"[" * 50_000,
    "5 MB body": b'{"text":"' + b"x" * _BIG + b'"}',
    "no input": _generate(),
    "two inputs": _generate(text="a", input_ids=[1]),
    "text is a number": _generate(text=5),
    "empty text": _generate(text=""),
    "empty text in a batch": _generate(text=["a", ""]),
    "empty batch": _generate(text=[]),
    "empty ids": _generate(input_ids=[]),
    "empty ids in a batch": _generate(input_ids=[[1], []]),
    "mixed ids": _generate(input_ids=[1, [2]]),
    "fractional id": _generate(input_ids=[1.5]),
    "text id": _generate(input_ids=["1"]),
    "unknown id": _generate(input_ids=[1, VOCAB_SIZE]),
    "negative id": _generate(input_ids=[-1]),
    "huge id": _generate(input_ids=[10**30]),
    "prompt over the context": _generate(text="x" * (MAX_CONTEXT + 1)),
    "prompt of megabytes": _generate(text="x" * 4_000_000),
    "negative length": _params(max_new_tokens=-1),
    "length over the context": _params(max_new_tokens=MAX_CONTEXT),
    "huge length": _params(max_new_tokens=10**18),
    "absurd length": _params(max_new_tokens=10**100),
    "length is a text": _params(max_new_tokens="5"),
    "length is a bool": _params(max_new_tokens=True),
    "minimum over maximum": _params(max_new_tokens=2, min_new_tokens=3),
    "negative temperature": _params(temperature=-0.5),
    "infinite temperature": b'{"text":"a","sampling_params":{"temperature":1e999}}',
    "temperature is no number": b'{"text":"a","sampling_params":{"temperature":NaN}}',
    "top_p zero": _params(top_p=0),
    "top_p above one": _params(top_p=1.1),
    "top_k": _params(top_k=-5),
    "min_p": _params(min_p=-0.1),
    "penalty": _params(frequency_penalty=5),
    "empty stop": _params(stop=""),
    "unknown stop id": _params(stop_token_ids=[VOCAB_SIZE]),
    "unknown bias id": _params(logit_bias={str(VOCAB_SIZE): 1}),
    "bias is no id": _params(logit_bias={"x": 1}),
    "huge bias": _params(logit_bias={"1": 1e9}),
    "n zero": _params(n=0),
    "n huge": _params(n=10**9),
    "regex": _params(regex="a+"),
    "params per prompt": _generate(text=["a", "b"], sampling_params=[{}]),
    "n differs": _generate(text=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}]),
    "rids": _generate(text=["a", "b"], rid=["x"]),
    "logprob start": _generate(text="abc", return_logprob=True, logprob_start_len=4),
    "top logprobs": _generate(text="abc", return_logprob=True, top_logprobs_num=21),
    "token_ids_logprob": _generate(text="abc", token_ids_logprob=[1]),
}
_BAD_COMPLETION = {
    "cut JSON": b"{",
    "5 MB body": b'{"prompt":"' + b"x" * _BIG + b'"}',
    "no prompt": json.dumps(_MEETING).encode(),
    "empty prompt": _completion(prompt=""),
    "empty list": _completion(prompt=[]),
    "mixed list": _completion(prompt=["a", 1]),
    "mixed ids": _completion(prompt=[[1], 2]),
    "prompt is an object": _completion(prompt={}),
    "unknown id": _completion(prompt=[VOCAB_SIZE]),
    "prompt over the context": _completion(prompt="x" * (MAX_CONTEXT + 1)),
    "negative length": _completion(max_tokens=-1),
    "huge length": _completion(max_tokens=10**18),
    "temperature": _completion(temperature=2.5),
    "n": _completion(n=0),
    "best_of": _completion(n=1, best_of=2),
    "suffix": _completion(suffix="x"),
    "logprobs": _completion(logprobs=21),
    "negative logprobs": _completion(logprobs=-1),
    "json": _completion(response_format={"type": "json_object"}),
}
_BAD_CHAT = {
    "cut JSON": b'{"messages":[',
    "invalid UTF-8": b'{"messages":[{"role":"user","content":"\xff"}]}',
    "no messages": json.dumps(_MEETING).encode(),
    "empty messages": _chat(messages=[]),
    "messages is a text": _chat(messages="hi"),
    "message without role": _chat(messages=[{"content": "x"}]),
    "image": _chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    "template error": _chat(messages=[{"role": "forbidden", "content": ""}]),
    "too long": _chat(messages=[{"role": "user", "content": "x" * MAX_CONTEXT}]),
    "zero length": _chat(max_tokens=0),
    "huge length": _chat(max_completion_tokens=10**18),
    "temperature": _chat(temperature=-1),
    "tool choice": _chat(tool_choice="required"),
    "json": _chat(response_format={"type": "json_schema", "json_schema": {}}),
    "top logprobs alone": _chat(top_logprobs=2),
}
_CASES = [
    pytest.param(path, raw, id=f"{path}-{name}")
    for path, cases in (
        ("/generate", _BAD_GENERATE),
        ("/v1/completions", _BAD_COMPLETION),
        ("/v1/chat/completions", _BAD_CHAT),
    )
    for name, raw in cases.items()
]
_BAD_MEETINGS = [
    {"bootstrap_room": None},
    {"bootstrap_host": None},
    {"bootstrap_host": ""},
    {"bootstrap_host": 5},
    {"bootstrap_room": "7"},
    {"bootstrap_room": -1},
    {"bootstrap_room": 2**63},
    {"bootstrap_room": 1.5},
    {"bootstrap_room": [1, 2]},
    {"bootstrap_port": 70_000},
    {"bootstrap_port": "8998"},
]


def _check(running: Running, path: str, raw: bytes) -> Answer:
    began = time.monotonic()
    answer = running.post(path, raw)
    assert time.monotonic() - began < 1
    assert answer.status == 400, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.message) > 10
    assert answer.json["error"]["code"] == 400
    assert ("type" in answer.json["error"]) == path.startswith("/v1/")
    scheduler = running.service.scheduler
    assert isinstance(scheduler, ScriptedScheduler)
    assert scheduler.stats().live == 0
    return answer


@pytest.mark.parametrize(("path", "raw"), _CASES)
def test_bad_input_is_refused_alike_by_every_role(
    plain: Running, prefill_side: Running, decode_side: Running, path: str, raw: bytes
) -> None:
    answers = [_check(running, path, raw) for running in (plain, prefill_side, decode_side)]
    assert len({answer.message for answer in answers}) == 1


@pytest.mark.parametrize("change", _BAD_MEETINGS)
def test_bad_meetings(prefill_side: Running, decode_side: Running, change: dict[str, Any]) -> None:
    for path, body in (("/generate", {"text": "abc"}), ("/v1/completions", {"prompt": "abc"})):
        raw = json.dumps({**_MEETING, **body, **change}).encode()
        answers = [_check(running, path, raw) for running in (prefill_side, decode_side)]
        assert answers[0].message == answers[1].message
        assert "bootstrap" in answers[0].message


def test_the_server_goes_on(plain: Running) -> None:
    for raw in _BAD_GENERATE.values():
        plain.post("/generate", raw)
    assert plain.post("/generate", _params(max_new_tokens=2)).json["text"] == "de"


def test_unknown_paths_and_methods_are_404(plain: Running) -> None:
    for method, path in (("GET", "/nothing"), ("GET", "/generate"), ("POST", "/generate/")):
        answer = plain.request(method, path, None)
        assert answer.status == 404
        assert path in answer.message
    answer = plain.get("/v1/nothing")
    assert (answer.status, answer.json["error"]["type"]) == (404, "NotFoundError")


def test_an_unexpected_error_is_500_in_the_right_form() -> None:
    def fail() -> dict[str, object]:
        raise ZeroDivisionError("a secret")

    with serving_script(ScriptedScheduler(), ServiceHooks(state=fail)) as running:
        answer = running.get("/server_info")
        assert answer.status == 500
        assert "ZeroDivisionError" in answer.message and "secret" not in answer.message
        assert running.get("/health").status == 200


def test_a_request_id_comes_back(plain: Running) -> None:
    for body in ({"text": "abc"}, {"text": "abc", "stream": True}, {}):
        answer = plain.post("/generate", body, {"X-Request-ID": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"


def test_a_request_id_is_made_when_there_is_none(plain: Running) -> None:
    ids = [plain.get("/health").headers["x-request-id"] for _ in range(2)]
    assert ids[0] != ids[1]
    strange = plain.get("/health", {"X-Request-ID": "x" * 500}).headers["x-request-id"]
    assert len(strange) == 32


def test_the_limit_of_a_body_can_be_set() -> None:
    with serving_script(ScriptedScheduler(), max_body_bytes=50) as running:
        assert "more than 50 bytes" in running.post("/generate", {"text": "x" * 50}).message
        assert running.post("/generate", {"text": "x"}).status == 200
