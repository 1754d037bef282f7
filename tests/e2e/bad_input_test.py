# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be served: a clear error from both servers in under a second."""

import concurrent.futures
import json
import time
from typing import Any

import pytest

from kvferry.demo.stack import Stack
from kvferry.tests.e2e.serving import generate, post

_LIMIT_SECONDS = 1.0
_IDS = [1, 2, 3, 4, 5]


def _with(**sampling: Any) -> dict[str, Any]:
    return {"input_ids": _IDS, "sampling_params": {"max_new_tokens": 4, **sampling}}


_CASES: dict[str, tuple[Any, str]] = {
    "longer than the context": ({"input_ids": [1] * 600}, "512"),
    "prompt and answer longer than the context": (
        {"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": 100}},
        "512",
    ),
    "no prompt": ({"sampling_params": {"max_new_tokens": 4}}, "input_ids"),
    "empty ids": ({"input_ids": []}, "empty"),
    "empty text": ({"text": ""}, "empty"),
    "text and ids": ({"text": "a", "input_ids": _IDS}, "both"),
    "invalid JSON": (b'{"text": ', "JSON"),
    "not an object": (b"[1, 2]", "object"),
    "invalid UTF-8": (b'{"text": "\xff\xfe"}', "utf-8"),
    "wrong type of text": ({"text": 5}, "text"),
    "wrong type of a parameter": (_with(max_new_tokens="x"), "max_new_tokens"),
    "negative max_new_tokens": (_with(max_new_tokens=-1), "-1"),
    "huge max_new_tokens": (_with(max_new_tokens=10**12), "1000000000000"),
    "temperature below 0": (_with(temperature=-0.5), "temperature"),
    "top_p of 0": (_with(top_p=0.0), "top_p"),
    "unknown token id": ({"input_ids": [1, 10**6]}, "1000000"),
    "negative token id": ({"input_ids": [1, -2]}, "-2"),
    "5 MB": ({"text": "a" * 5_000_000}, "4194304"),
}


@pytest.mark.parametrize("name", _CASES)
def test_bad_requests_are_400_from_both_at_once(pair: Stack, name: str) -> None:
    body, hint = _CASES[name]
    meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 4}
    raw = body if isinstance(body, bytes) else json.dumps(body | meeting).encode()
    for url in (*pair.prefill_urls, *pair.decode_urls):
        started = time.monotonic()
        status, answer = post(url, "/generate", raw)
        assert time.monotonic() - started < _LIMIT_SECONDS
        assert status == 400, answer
        assert hint.lower() in answer["error"]["message"].lower()
    assert generate(pair.router_url, _IDS, 2)["output_ids"]


def test_through_the_router(pair: Stack) -> None:
    started = time.monotonic()
    status, answer = post(pair.router_url, "/generate", {"input_ids": [1] * 600})
    assert time.monotonic() - started < _LIMIT_SECONDS
    assert status == 400
    assert "512" in json.dumps(answer)


def test_a_request_without_a_room_needs_a_router(pair: Stack) -> None:
    for url in (*pair.prefill_urls, *pair.decode_urls):
        status, answer = post(url, "/generate", {"input_ids": _IDS})
        assert status == 400
        assert "bootstrap" in answer["error"]["message"]


def test_a_wrong_prefill_address_fails_only_its_request(pair: Stack) -> None:
    """Nothing listens there: the decode server says so within seconds, and serves others."""
    meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 77}
    url = pair.decode_urls[0]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        wrong = threads.submit(post, url, "/generate", {"input_ids": _IDS, **meeting})
        assert generate(pair.router_url, _IDS, 2)["output_ids"]
        status, answer = wrong.result(timeout=5)
    assert status == 503
    assert "127.0.0.1:1" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("for_decode", "hint"), [([1] * 9, "counts 9 prompt tokens"), ([2] * 5, "another prompt")]
)
def test_different_prompts_for_one_room(pair: Stack, for_decode: list[int], hint: str) -> None:
    """The two servers were sent different prompts: both say so instead of mixing them up."""
    meeting = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.prefills[0].bootstrap_port,
        "bootstrap_room": 4711 + for_decode[0],
    }
    bodies = [{"input_ids": ids, **meeting} for ids in ([1] * 5, for_decode)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        urls = (pair.prefill_urls[0], pair.decode_urls[0])
        answers = list(threads.map(lambda url, body: post(url, "/generate", body), urls, bodies))
    for status, answer in answers:
        assert status == 500
        assert hint in answer["error"]["message"]
