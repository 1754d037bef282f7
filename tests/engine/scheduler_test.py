# SPDX-License-Identifier: Apache-2.0
"""Tests of continuous batching with a real model: the same answers under any circumstances."""

import functools
from typing import Any

import numpy as np
import pytest

from kvferry.engine.request import FinishReason, RequestOutput
from kvferry.engine.scheduler import QueueFullError, Scheduler, SchedulerStoppedError
from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.tests.engine.driving import (
    Answer,
    assert_baseline,
    drive,
    greedy_answer,
    log_softmax,
    logits_after,
    make_request,
    make_scheduler,
    random_prompt,
    shared_runner,
    shared_sampler,
    shared_tokenizer,
    submit,
)
from kvferry.tests.engine.tiny import (
    CHUNK_TOKENS,
    EOS_ID,
    MAX_CONTEXT,
    PAGE_SIZE,
    VOCAB_SIZE,
    tiny_model,
    tiny_runner,
)

LENGTHS = [
    1,
    PAGE_SIZE - 1,
    PAGE_SIZE,
    PAGE_SIZE + 1,
    CHUNK_TOKENS - 1,
    CHUNK_TOKENS,
    CHUNK_TOKENS + 1,
    2 * CHUNK_TOKENS,
    5 * CHUNK_TOKENS // 2,
]


def expected(prompt: list[int], count: int) -> list[int]:
    return greedy_answer(tuple(prompt), count)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_one_request(length: int, count: int) -> None:
    scheduler = make_scheduler()
    prompt = random_prompt(length)
    answer = submit(scheduler, prompt, max_new_tokens=count)
    drive(scheduler, answer)
    assert answer.token_ids == expected(prompt, count)
    assert answer.finish == FinishReason("length")
    last = answer.outputs[-1]
    assert (last.prompt_tokens, last.completion_tokens) == (length, count)
    assert answer.text == shared_tokenizer().decode(answer.token_ids)
    assert_baseline(scheduler)


def test_near_the_context_limit() -> None:
    scheduler = make_scheduler()
    longest = submit(scheduler, random_prompt(MAX_CONTEXT - 1), max_new_tokens=None)
    shorter = submit(scheduler, random_prompt(MAX_CONTEXT - 9), max_new_tokens=None)
    drive(scheduler, longest, shorter)
    assert longest.token_ids == expected(random_prompt(MAX_CONTEXT - 1), 1)
    assert shorter.token_ids == expected(random_prompt(MAX_CONTEXT - 9), 9)
    assert_baseline(scheduler)


def test_batch_gives_the_answers_of_single_requests() -> None:
    scheduler = make_scheduler()
    prompts = [random_prompt(length) for length in LENGTHS]
    answers = [submit(scheduler, prompt, max_new_tokens=9) for prompt in prompts]
    drive(scheduler, *answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(prompt, 9)
    assert_baseline(scheduler)


def test_requests_that_join_a_running_batch() -> None:
    scheduler = make_scheduler()
    prompts = [random_prompt(length, seed=1) for length in (5, 40, 3, 70, 9)]
    answers: list[Answer] = []
    for prompt in prompts:
        answers.append(submit(scheduler, prompt, max_new_tokens=9))
        for _ in range(3):
            scheduler.turn()
    drive(scheduler, *answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(prompt, 9)


@functools.cache
def crowd() -> tuple[list[list[int]], int]:
    """Requests that need far more pages together than the pool has."""
    return [random_prompt(length, seed=2) for length in (30, 22, 37, 9, 33, 41)], 45


def test_preempted_requests_answer_the_same() -> None:
    scheduler = make_scheduler()
    prompts, count = crowd()
    answers = [submit(scheduler, prompt, max_new_tokens=count) for prompt in prompts]
    drive(scheduler, *answers)
    assert scheduler.stats().preemptions_total > 0, "the test needs page pressure"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(prompt, count)
        assert answer.text == shared_tokenizer().decode(answer.token_ids)
    assert_baseline(scheduler)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.1, "presence_penalty": 0.5, "min_new_tokens": 30, "ignore_eos": False},
    ],
)
def test_seeded_requests_answer_the_same_alone_crowded_and_preempted(
    fields: dict[str, Any],
) -> None:
    prompts, count = crowd()
    alone = []
    for seed, prompt in enumerate(prompts):
        scheduler = make_scheduler()
        alone.append(submit(scheduler, prompt, max_new_tokens=count, seed=seed, **fields))
        drive(scheduler, alone[-1])
    crowded = make_scheduler()
    answers = [
        submit(crowded, prompt, max_new_tokens=count, seed=seed, **fields)
        for seed, prompt in enumerate(prompts)
    ]
    drive(crowded, *answers)
    assert crowded.stats().preemptions_total > 0
    for one, other in zip(alone, answers, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish == other.finish
    assert len({tuple(answer.token_ids[:5]) for answer in answers}) == len(answers)


def test_requests_without_a_seed_differ() -> None:
    scheduler = make_scheduler()
    answers = [submit(scheduler, random_prompt(5), temperature=1.5) for _ in range(4)]
    drive(scheduler, *answers)
    assert len({tuple(answer.token_ids) for answer in answers}) == 4


def test_throughput_recovers_after_a_preemption() -> None:
    scheduler = make_scheduler()
    prompts, count = crowd()
    for _ in range(2):
        answers = [submit(scheduler, prompt, max_new_tokens=count) for prompt in prompts]
        drive(scheduler, *answers)
    light = [submit(scheduler, random_prompt(4, seed=s), max_new_tokens=8) for s in range(4)]
    steps = scheduler.num_steps
    drive(scheduler, *light)
    assert scheduler.num_steps - steps <= 2 + 8, "four small requests run side by side again"


def test_oldest_first_and_no_starvation() -> None:
    """A large request is not overtaken for ever by small ones that would fit."""
    scheduler = make_scheduler()
    order: list[str] = []

    class Noted(Answer):
        def __call__(self, output: RequestOutput) -> None:
            super().__call__(output)
            if len(self.outputs) == 1:
                order.append(output.request_id)

    def put(name: str, length: int) -> Answer:
        answer = Noted()
        scheduler.submit(
            make_request(answer, random_prompt(length), request_id=name, max_new_tokens=12)
        )
        return answer

    answers = [put("a", 60), put("large", 110)] + [put(f"small{i}", 4) for i in range(6)]
    drive(scheduler, *answers)
    assert order[:2] == ["a", "large"]


@pytest.mark.parametrize("length", [1, 5, 33, 80])
def test_logprobs(length: int) -> None:
    scheduler = make_scheduler()
    prompt = random_prompt(length, seed=3)
    answer = submit(scheduler, prompt, return_logprob=True, top_logprobs_num=4, logprob_start_len=0)
    drive(scheduler, answer)
    reference = log_softmax(logits_after([*prompt, *answer.token_ids]))
    entries = answer.prompt_logprobs
    assert entries is not None and len(entries) == length
    assert (entries[0].logprob, entries[0].token_id, entries[0].top) == (None, prompt[0], ())
    everything = [*entries, *answer.logprobs]
    assert [entry.token_id for entry in everything] == [*prompt, *answer.token_ids]
    for entry, row in zip(everything[1:], reference[:-1], strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        best = np.argsort(-row)[:4]
        assert [token for _, token in entry.top] == best.tolist()
        np.testing.assert_allclose([value for value, _ in entry.top], row[best], atol=1e-4)


@pytest.mark.parametrize("start", [-1, 0, 1, 31, 32, 33, 39, 40])
def test_prompt_logprobs_from_any_position(start: int) -> None:
    scheduler = make_scheduler()
    prompt = random_prompt(40, seed=4)
    other = submit(scheduler, random_prompt(20, seed=4))
    answer = submit(scheduler, prompt, return_logprob=True, logprob_start_len=start)
    drive(scheduler, answer, other)
    entries = answer.prompt_logprobs
    assert len(answer.logprobs) == 8
    if start < 0:
        assert entries is None
        return
    assert entries is not None
    assert [entry.token_id for entry in entries] == prompt[start:]
    reference = log_softmax(logits_after(prompt))
    for position, entry in enumerate(entries, start=start):
        if position == start:
            assert entry.logprob is None
        else:
            assert entry.logprob == pytest.approx(
                reference[position - 1, prompt[position]], abs=1e-4
            )
    assert other.outputs[0].logprobs is None and other.prompt_logprobs is None


def test_prompt_logprobs_of_a_request_that_is_preempted() -> None:
    scheduler = make_scheduler()
    prompts, count = crowd()
    fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    answers = [submit(scheduler, prompt, max_new_tokens=count, **fields) for prompt in prompts]
    drive(scheduler, *answers)
    assert scheduler.stats().preemptions_total > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == len(prompt)
        assert len(answer.logprobs) == count


def test_zero_tokens_computes_the_prompt_only() -> None:
    scheduler = make_scheduler()
    answer = submit(
        scheduler, random_prompt(9), max_new_tokens=0, return_logprob=True, logprob_start_len=0
    )
    drive(scheduler, answer)
    assert (answer.token_ids, answer.text, answer.logprobs) == ([], "", [])
    assert answer.finish == FinishReason("length")
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 9
    assert_baseline(scheduler)


def test_end_token_ends_unless_ignored() -> None:
    scheduler = make_scheduler()
    bias = {EOS_ID: 100.0}
    stopped = submit(scheduler, random_prompt(5), logit_bias=bias, ignore_eos=False)
    ignored = submit(scheduler, random_prompt(5), logit_bias=bias)
    late = submit(scheduler, random_prompt(5), logit_bias=bias, ignore_eos=False, min_new_tokens=3)
    drive(scheduler, stopped, ignored, late)
    assert stopped.token_ids == [EOS_ID] and stopped.text == ""
    assert stopped.finish == FinishReason("stop", matched=EOS_ID)
    assert ignored.token_ids == [EOS_ID] * 8
    assert len(late.token_ids) == 4 and late.token_ids[3] == EOS_ID
    assert EOS_ID not in late.token_ids[:3]


def test_stop_token_and_stop_string() -> None:
    scheduler = make_scheduler()
    prompt = random_prompt(6, seed=5)
    greedy = expected(prompt, 12)
    place = next(i for i, token in enumerate(greedy) if token not in greedy[:i] and i >= 3)
    by_id = submit(scheduler, prompt, max_new_tokens=12, stop_token_ids=(greedy[place],))
    text = shared_tokenizer().decode(greedy)
    by_text = submit(scheduler, prompt, max_new_tokens=12, stop=(text[2:4],))
    drive(scheduler, by_id, by_text)
    assert by_id.token_ids == greedy[: place + 1]
    assert by_id.finish == FinishReason("stop", matched=greedy[place])
    assert by_text.text == text[: text.find(text[2:4])]
    assert by_text.finish == FinishReason("stop", matched=text[2:4])
    assert_baseline(scheduler)


def test_stages_are_timed() -> None:
    scheduler = make_scheduler()
    answer = submit(scheduler, random_prompt(40))
    drive(scheduler, answer)
    marks = answer.outputs[-1].marks
    stages = ["arrival", "admitted", "prefill_start", "prefill_done", "first_token"]
    times = [marks[stage] for stage in [*stages, "decode_start", "finish"]]
    assert times == sorted(times)
    assert answer.outputs[0].marks == {}


def test_serving_traces_nothing_new() -> None:
    runner, sampler = shared_runner(), shared_sampler()
    runner.warm_up(lambda done, total, label: None, on_logits=sampler.warm_up)
    traces = (runner.num_traces, sampler.num_traces)
    scheduler = make_scheduler()
    answers = [
        submit(scheduler, random_prompt(length), **fields)
        for length in (1, 7, 32, 75)
        for fields in (
            {"temperature": 0.0},
            {"temperature": 1.0, "top_p": 0.5},
            {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3},
            {"repetition_penalty": 1.2, "return_logprob": True, "logprob_start_len": 0},
        )
    ]
    drive(scheduler, *answers)
    assert (runner.num_traces, sampler.num_traces) == traces


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([5] * MAX_CONTEXT, {"max_new_tokens": None}, f"has {MAX_CONTEXT} tokens; with 1 to"),
        ([5] * 100, {"max_new_tokens": 29}, "29 more are asked for.* at most 28"),
        ([5, VOCAB_SIZE], {}, f"prompt token 1 has id {VOCAB_SIZE}"),
        ([-1], {}, "prompt token 0 has id -1"),
        ([5], {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids has token id"),
        ([5], {"top_logprobs_num": 21}, "top_logprobs_num is 21"),
        ([5], {"logprob_start_len": 2}, "logprob_start_len is 2"),
    ],
)
def test_refused_requests(prompt: list[int], fields: dict[str, Any], message: str) -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match=message):
        submit(scheduler, prompt, **fields)
    assert_baseline(scheduler)


def test_queue_is_bounded() -> None:
    scheduler = make_scheduler(max_running_requests=2, max_queued_requests=3)
    answers = [submit(scheduler, random_prompt(5, seed=i)) for i in range(5)]
    with pytest.raises(QueueFullError, match="5 requests are in progress or queued"):
        submit(scheduler, random_prompt(5))
    scheduler.turn()
    with pytest.raises(QueueFullError):
        submit(scheduler, random_prompt(5))
    drive(scheduler, *answers)
    assert scheduler.stats().max_slots == 2
    drive(scheduler, submit(scheduler, random_prompt(5)))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_running_requests": 5}, "max_running_requests is 5; this runner takes 1 to 4"),
        ({"chunk_tokens": 64}, "chunk_tokens is 64; this runner takes 4 to 32"),
        ({"chunk_tokens": 3}, "chunk_tokens is 3"),
        ({"max_queued_requests": -1}, "max_queued_requests is -1"),
    ],
)
def test_limits_beyond_the_runner(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**limits)


def test_draining_refuses_new_requests() -> None:
    scheduler = make_scheduler()
    answer = submit(scheduler, random_prompt(5))
    scheduler.stop()
    assert answer.finish == FinishReason("abort", message="the server is shutting down", status=503)
    with pytest.raises(SchedulerStoppedError, match="shutting down"):
        submit(scheduler, random_prompt(5))
    assert_baseline(scheduler)


def test_logits_that_are_no_numbers_end_only_their_request() -> None:
    model = tiny_model()
    poison = 255
    model.params["embed"][poison] = np.nan
    scheduler = Scheduler(
        tiny_runner(model), shared_tokenizer(), SchedulerLimits(), sampler=shared_sampler()
    )
    prompt = [token % poison for token in random_prompt(7)]
    good = submit(scheduler, prompt)
    bad = submit(scheduler, [1, poison])
    drive(scheduler, good, bad)
    assert bad.finish is not None
    assert (bad.finish.kind, bad.finish.status) == ("abort", 500)
    assert "no usable logits" in bad.finish.message
    assert good.finish == FinishReason("length")
    again = submit(scheduler, prompt)
    drive(scheduler, again)
    assert again.token_ids == good.token_ids == expected(prompt, 8)
    assert_baseline(scheduler)
