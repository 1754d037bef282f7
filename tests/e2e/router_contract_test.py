# SPDX-License-Identifier: Apache-2.0
"""Both routers of sglang_router in front of a pair: shapes, batches, streams, log-probabilities."""

import concurrent.futures
import functools
import json
import pathlib
import urllib.parse
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import openai
import pytest

from kvferry.demo.stack import Stack
from kvferry.tests.e2e.serving import TINY_FLAGS, by_role, generate, post, wait_at_rest

_IDS = [3, 1, 4, 1, 5, 9]
_SAMPLING = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
_CHAT: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(name="mini_lb", scope="module")
def _mini_lb(tiny_model: pathlib.Path) -> Iterator[Stack]:
    with Stack(tiny_model, router="mini-lb", flags=by_role(TINY_FLAGS)) as stack:
        yield stack


@pytest.fixture(name="stack", params=["rust", "mini-lb"])
def _stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    name = "shared_pair" if request.param == "rust" else "mini_lb"
    stack: Stack = request.getfixturevalue(name)
    yield stack
    wait_at_rest(*stack.prefills, *stack.decodes)


def _events(url: str, path: str, body: Any) -> list[dict[str, Any]]:
    """Streams an answer; checks framing and end mark."""
    connection = HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    blocks = connection.getresponse().read().decode().strip().split("\n\n")
    connection.close()
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def test_stream_is_cumulative_and_equals_the_whole(stack: Stack) -> None:
    whole = generate(stack.router_url, _IDS, 5)
    body = {"input_ids": _IDS, "sampling_params": _SAMPLING, "stream": True}
    events = _events(stack.router_url, "/generate", body)
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]
    for before, after in zip(events, events[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None


def test_batches_answer_in_order(stack: Stack) -> None:
    batch = [[1, 2, 3], [4, 5], [6]]
    body = {"input_ids": batch, "sampling_params": _SAMPLING}
    status, answers = post(stack.router_url, "/generate", body)
    assert status == 200
    singles = [generate(stack.router_url, ids, 5)["output_ids"] for ids in batch]
    assert [answer["output_ids"] for answer in answers] == singles


@pytest.mark.parametrize("n", [1, 3])
def test_samples_of_two_prompts(stack: Stack, n: int) -> None:
    """One scalar room, or one room per prompt, for n sequences each: none may wait for ever."""
    body = {"model": "m", "prompt": ["a b", "c d"], "max_tokens": 3, "n": n, "temperature": 0}
    status, answer = post(stack.router_url, "/v1/completions", body)
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))


def test_prompt_logprobs_come_from_prefill(stack: Stack) -> None:
    answer = generate(stack.router_url, _IDS, 5, return_logprob=True, logprob_start_len=0)
    prompt = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in prompt] == _IDS
    assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer[
        "output_ids"
    ]


def test_the_same_rid_twice(stack: Stack) -> None:
    answers = [generate(stack.router_url, _IDS, 3, rid="again") for _ in range(2)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert answers[0]["meta_info"]["id"] == "again"


def test_openai_client(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.router_url}/v1", api_key="none", max_retries=0)
    ask = functools.partial(
        client.chat.completions.create, model="m", messages=_CHAT, temperature=0, max_tokens=6
    )
    whole = ask()
    chunks: list[Any] = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_many_at_once_are_all_right(stack: Stack) -> None:
    prompts = [[n + 1] * (n % 40 + 1) for n in range(48)]
    alone = [generate(stack.router_url, ids, 4)["output_ids"] for ids in prompts[:8]]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda ids: generate(stack.router_url, ids, 4), prompts))
    assert [answer["output_ids"] for answer in answers[:8]] == alone
