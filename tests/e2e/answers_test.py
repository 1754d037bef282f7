# SPDX-License-Identifier: Apache-2.0
"""The real model behind the real router answers what one server, and transformers, answer."""

import collections
import concurrent.futures
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvferry.demo.model import default_model_path
from kvferry.demo.stack import Server, Stack
from kvferry.tests.e2e.serving import (
    SMOLLM2_FLAGS,
    by_role,
    generate,
    state,
    wait_at_rest,
)
from kvferry.tests.engine.checkpoints import read_data

_PROMPTS = [p for p in read_data("smollm2.json")["prompts"] if len(p["ids"]) < 2000]
# Batching changes the order of sums. A step whose two best logits are closer than this may then
# go either way, and what follows it is not comparable any more.
_TIE_MARGIN = 1e-3
_LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(name="stack", scope="module")
def _stack() -> Iterator[Stack]:
    with Stack(default_model_path(), flags=by_role(SMOLLM2_FLAGS)) as stack:
        yield stack


@pytest.fixture(name="colocated", scope="module")
def _colocated(stack: Stack) -> Server:
    return stack.start_server("null")


def _ask(url: str, prompt: dict[str, Any]) -> Any:
    count = len(prompt["greedy"])
    return generate(url, prompt["ids"], count, return_logprob=True, logprob_start_len=0)


def _logprobs(answer: Any) -> list[tuple[float, int]]:
    meta = answer["meta_info"]
    entries = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    return [(value or 0.0, token) for value, token, _ in entries]


def _ties_used(tokens: list[int], prompt: dict[str, Any]) -> int:
    """Compares with the oracle; returns 1 if a tie had to be invoked, else 0."""
    for step, (found, wanted) in enumerate(zip(tokens, prompt["greedy"], strict=True)):
        if found != wanted:
            margin = prompt["margins"][step]
            assert margin < _TIE_MARGIN, (prompt["name"], step, found, wanted, margin)
            return 1
    return 0


def test_one_at_a_time_equals_colocated_and_oracle(stack: Stack, colocated: Server) -> None:
    for prompt in _PROMPTS:
        paired = _ask(stack.router_url, prompt)
        alone = _ask(colocated.url, prompt)
        assert paired["output_ids"] == alone["output_ids"], prompt["name"]
        assert paired["text"] == alone["text"]
        assert _ties_used(paired["output_ids"], prompt) == 0
        ours, theirs = _logprobs(paired), _logprobs(alone)
        assert [token for _, token in ours] == [token for _, token in theirs]
        for (found, _), (wanted, _) in zip(ours, theirs, strict=True):
            assert abs(found - wanted) <= _LOGPROB_TOLERANCE
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason"):
            assert paired["meta_info"][name] == alone["meta_info"][name], name
    wait_at_rest(*stack.prefills, *stack.decodes)


def test_sixteen_at_a_time_equal_the_oracle(
    stack: Stack, colocated: Server, record_property: pytest.FixtureRequest
) -> None:
    ties: collections.Counter[str] = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for url in (stack.router_url, colocated.url):
            answers = list(threads.map(lambda prompt, url=url: _ask(url, prompt), _PROMPTS))
            for prompt, answer in zip(_PROMPTS, answers, strict=True):
                ties[url] += _ties_used(answer["output_ids"], prompt)
    print(
        f"steps that differed because the two best logits were closer than {_TIE_MARGIN}:"
        f" {ties[stack.router_url]} through the pair, {ties[colocated.url]} colocated,"
        f" of {sum(len(prompt['greedy']) for prompt in _PROMPTS)} each"
    )
    wait_at_rest(*stack.prefills, *stack.decodes)


def test_serving_traces_nothing_new(stack: Stack, colocated: Server) -> None:
    servers = [*stack.prefills, *stack.decodes, colocated]
    before = [state(server)["num_traces"] for server in servers]
    for length in (3, 40, 200, 700):
        ids = [17 + n % 3000 for n in range(length)]
        for url in (stack.router_url, colocated.url):
            generate(url, ids, 4, return_logprob=True, logprob_start_len=0, top_logprobs_num=5)
            sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "max_new_tokens": 3}
            sampling |= {"frequency_penalty": 0.5, "sampling_seed": 7}
            generate(url, ids, 4, sampling_params=sampling)
    assert [state(server)["num_traces"] for server in servers] == before


def test_a_seeded_request_is_the_same_on_pair_and_single_server(
    stack: Stack, colocated: Server
) -> None:
    # Not `seed`: the Rust router drops what it does not know, and it knows SGLang's name.
    sampling = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 12, "sampling_seed": 1234}
    ids = _PROMPTS[2]["ids"]
    paired = generate(stack.router_url, ids, 0, sampling_params=sampling)
    alone = generate(colocated.url, ids, 0, sampling_params=sampling)
    assert paired["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_shortest_answers(stack: Stack, colocated: Server, max_tokens: int) -> None:
    ids = _PROMPTS[0]["ids"]
    paired = generate(stack.router_url, ids, max_tokens)
    assert paired["output_ids"] == generate(colocated.url, ids, max_tokens)["output_ids"]
    assert paired["meta_info"]["completion_tokens"] == max_tokens


def test_stopping_at_the_first_token(stack: Stack) -> None:
    prompt = _PROMPTS[0]
    first = prompt["greedy"][0]
    sampling = {"temperature": 0, "max_new_tokens": 8, "stop_token_ids": [first]}
    answer = generate(stack.router_url, prompt["ids"], 8, sampling_params=sampling)
    assert answer["output_ids"] == [first]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}
    wait_at_rest(*stack.prefills, *stack.decodes)


def test_openai_client_streams_a_chat(stack: Stack, colocated: Server) -> None:
    def chat(url: str) -> str:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chunks = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=24,
            stream=True,
        )
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    answer = chat(stack.router_url)
    assert "Paris" in answer
    assert answer == chat(colocated.url)
