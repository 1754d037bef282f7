# SPDX-License-Identifier: Apache-2.0
"""The server on a real scheduler and a tiny random model."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.engine.scheduler import Scheduler
from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.server.interfaces import ServiceOptions
from kvferry.tests.engine.tiny import EOS_ID, MAX_CONTEXT, VOCAB_SIZE, tiny_model, tiny_runner
from kvferry.tests.server.running import Running, read_until, serving, wait_until


@pytest.fixture(scope="module", name="engine")
def _engine() -> Iterator[Running]:
    model = tiny_model()
    runner = tiny_runner(model)
    limits = SchedulerLimits(max_queued_requests=12)
    scheduler = Scheduler(runner, model.tokenizer, limits)
    scheduler.start()
    options = ServiceOptions(model_name=model.name, max_context=runner.sizes.max_context)
    with serving(scheduler, model.tokenizer, options) as running:
        yield running
    scheduler.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Running) -> Iterator[None]:
    yield
    wait_until(lambda: engine.service.scheduler.stats().live == 0, "all requests are gone")
    assert engine.service.scheduler.stats().used_pages == 0


def _ask(engine: Running, text: str, **params: Any) -> Any:
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **params}}
    answer = engine.post("/generate", body)
    assert answer.status == 200, answer.body
    return answer.json


def test_all_forms_of_asking_give_the_same_text(engine: Running) -> None:
    whole = _ask(engine, "the end", ignore_eos=True)
    assert len(whole["output_ids"]) == 8
    shared = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
    body = {"text": "the end", "sampling_params": params, "stream": True}
    assert engine.post("/generate", body).events[-1]["text"] == whole["text"]
    answer = engine.post("/v1/completions", {"prompt": "the end", **shared})
    assert answer.json["choices"][0]["text"] == whole["text"]
    body = {"prompt": "the end", **shared, "stream": True}
    events = engine.post("/v1/completions", body).events
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    batch = engine.post("/generate", {"text": ["the end", "thin"], "sampling_params": params})
    assert batch.json[0]["text"] == whole["text"]


def test_stop_string(engine: Running) -> None:
    whole = _ask(engine, "the end", ignore_eos=True)
    stop = whole["text"][3:5]
    cut = _ask(engine, "the end", ignore_eos=True, stop=[stop])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_end_token(engine: Running) -> None:
    bias = {str(EOS_ID): 100}
    answer = _ask(engine, "the end", logit_bias=bias)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    assert answer["text"] == ""
    answer = _ask(engine, "the end", logit_bias=bias, min_new_tokens=3)
    assert answer["meta_info"]["completion_tokens"] == 4


def test_logprobs_of_prompt_and_answer(engine: Running) -> None:
    body = {
        "text": "the end",
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
    }
    meta = engine.post("/generate", body).json["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"][1]) == 3
    assert len(meta["output_token_logprobs"]) == 4
    for (logprob, token, _), tops in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert tops[0][:2] == [logprob, token]


def test_seeds(engine: Running) -> None:
    def draw(**fields: Any) -> list[str]:
        body = {"prompt": "the end", "max_tokens": 8, "ignore_eos": True, "n": 3, **fields}
        choices = engine.post("/v1/completions", body).json["choices"]
        return [choice["text"] for choice in choices]

    first = draw(seed=5)
    assert len(set(first)) == 3
    assert draw(seed=5) == first
    assert draw(seed=6)[:2] == first[1:]


def test_concurrent_requests_agree_with_single_ones(engine: Running) -> None:
    prompts = [f"number {i}" for i in range(8)]
    alone = [_ask(engine, prompt, ignore_eos=True)["text"] for prompt in prompts]
    together: dict[str, str] = {}

    def ask(prompt: str) -> None:
        together[prompt] = _ask(engine, prompt, ignore_eos=True)["text"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[prompt] for prompt in prompts] == alone


def test_a_client_that_leaves_frees_its_pages(engine: Running) -> None:
    params = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    aborted = engine.service.scheduler.stats().finished_total["abort"]
    with engine.raw_post(
        "/generate", {"text": "x", "sampling_params": params, "stream": True}
    ) as connection:
        read_until(connection, b"data: ")
    wait_until(
        lambda: engine.service.scheduler.stats().finished_total["abort"] == aborted + 1,
        "the request is aborted",
    )


def test_a_full_queue_is_503(engine: Running) -> None:
    answer = engine.post("/generate", {"input_ids": [[1]] * 20})
    assert answer.status == 503
    assert "try again later" in answer.message


@pytest.mark.parametrize(
    "body",
    [
        {"text": ""},
        {"text": "x" * (MAX_CONTEXT + 1)},
        {"text": "x" * 100_000},
        {"input_ids": [VOCAB_SIZE]},
        {"text": "x", "sampling_params": {"max_new_tokens": MAX_CONTEXT}},
        {"text": "x", "sampling_params": {"max_new_tokens": 10**15}},
        {"text": "x", "sampling_params": {"stop_token_ids": [VOCAB_SIZE]}},
        {"text": "x", "sampling_params": {"seed": 2**70}},
    ],
)
def test_bad_input(engine: Running, body: dict[str, Any]) -> None:
    answer = engine.post("/generate", body)
    assert answer.status == 400, answer.body
    assert len(answer.message) > 10


def test_chat_without_a_template(engine: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = engine.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert "no chat template" in answer.message


def test_tokenize_and_back(engine: Running) -> None:
    tokens = engine.post("/tokenize", {"prompt": "the é"}).json["tokens"]
    assert engine.post("/detokenize", {"tokens": tokens}).json == {"text": "the é"}


def test_metrics_follow_the_scheduler(engine: Running) -> None:
    _ask(engine, "the end", ignore_eos=True)
    text = engine.get("/metrics").body.decode()
    for line in ("kvferry_kv_pages 64.0", "kvferry_kv_pages_free 64.0"):
        assert line in text
    assert 'kvferry_stage_seconds_count{stage="first_token"}' in text


def test_max_tokens_zero_computes_the_prompt_only(engine: Running) -> None:
    body = {"text": "the end", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    answer = engine.post("/generate", {**body, "logprob_start_len": 0}).json
    assert answer["output_ids"] == []
    assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]
    events = engine.post("/generate", {**body, "stream": True}).events
    assert json.dumps(events[-1]["meta_info"]["finish_reason"]) == '{"type": "length", "length": 0}'
