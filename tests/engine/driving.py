# SPDX-License-Identifier: Apache-2.0
"""Drives schedulers by hand over one shared tiny runner, and says what they should answer."""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.engine.request import FinishReason, Request, RequestOutput, TokenLogprob
from kvferry.engine.runner import ModelRunner
from kvferry.engine.sampler import Sampler
from kvferry.engine.sampling_params import SamplingParams
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.engine.step_inputs import Chunk
from kvferry.engine.tokenizer import Tokenizer
from kvferry.tests.engine.tiny import CHUNK_TOKENS, PAGE_SIZE, VOCAB_SIZE, tiny_model, tiny_runner

NUM_PAGES = 40
_REQUEST_FIELDS = {field.name for field in dataclasses.fields(Request)}


@functools.cache
def shared_runner() -> ModelRunner:
    """Returns the runner that all tests of a process share; its pool is small on purpose."""
    return tiny_runner(num_pages=NUM_PAGES)


@functools.cache
def shared_sampler() -> Sampler:
    """Returns the sampler that goes with `shared_runner`."""
    return Sampler(VOCAB_SIZE)


@functools.cache
def shared_tokenizer() -> Tokenizer:
    """Returns the tokenizer of the tiny model."""
    return tiny_model().tokenizer


def make_scheduler(kind: type[Scheduler] = Scheduler, **limits: Any) -> Any:
    """Returns a new scheduler over the shared parts; keyword arguments are its limits."""
    return kind(
        shared_runner(), shared_tokenizer(), SchedulerLimits(**limits), sampler=shared_sampler()
    )


class Answer:
    """Collects what a scheduler tells one client."""

    def __init__(self) -> None:
        self.ticket = 0
        self.outputs: list[RequestOutput] = []

    def __call__(self, output: RequestOutput) -> None:
        assert self.finish is None, "an output after the last one"
        self.outputs.append(output)

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for output in self.outputs for entry in output.logprobs or ()]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        assert all(output.prompt_logprobs is None for output in self.outputs[1:])
        return self.outputs[0].prompt_logprobs


def make_request(answer: Answer, prompt: list[int], **fields: Any) -> Request:
    """Returns a request; fields of `Request` and of `SamplingParams` are told apart by name."""
    params = {name: fields.pop(name) for name in list(fields) if name not in _REQUEST_FIELDS}
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True} | params
    fields = {"request_id": "test"} | fields
    return Request(
        prompt_ids=tuple(prompt), params=SamplingParams(**params), on_output=answer, **fields
    )


def submit(scheduler: Scheduler, prompt: list[int], **fields: Any) -> Answer:
    """Submits a greedy request of eight tokens; keyword arguments change that."""
    answer = Answer()
    answer.ticket = scheduler.submit(make_request(answer, prompt, **fields))
    return answer


def drive(scheduler: Scheduler, *answers: Answer, max_turns: int = 3000) -> None:
    """Takes turns until all the answers are finished."""
    for _ in range(max_turns):
        if all(answer.finish for answer in answers):
            return
        delay = scheduler.turn()
        unfinished = [answer for answer in answers if not answer.finish]
        assert delay == 0.0 or not unfinished, f"asleep with {len(unfinished)} unfinished"
    raise AssertionError(f"not finished after {max_turns} turns")


def take_turns(scheduler: Scheduler, condition: Any, max_turns: int = 500) -> None:
    """Takes turns until a condition holds."""
    for _ in range(max_turns):
        if condition():
            return
        scheduler.turn()
    raise AssertionError(f"the condition does not hold after {max_turns} turns")


def assert_baseline(scheduler: Scheduler) -> None:
    """Checks that nothing is left of any request."""
    stats = scheduler.stats()
    assert (stats.live, stats.used_pages, stats.used_slots, stats.num_tokens) == (0, 0, 0, 0)
    assert (stats.waiting, stats.prefilling, stats.running, stats.held) == (0, 0, 0, 0)
    assert scheduler.live() == ()
    assert sum(stats.finished_total.values()) == stats.accepted_total
    scheduler.allocator.check()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Returns token ids without special tokens."""
    return np.random.default_rng([length, seed]).integers(0, 256, length).tolist()


def logits_after(tokens: list[int]) -> npt.NDArray[np.float32]:
    """Computes the logits behind each position, one token at a time on an empty pool."""
    runner = shared_runner()
    pages = list(range(-(-len(tokens) // PAGE_SIZE)))
    rows = [
        np.asarray(runner.run([Chunk([token], start, pages)]).logits)[0]
        for start, token in enumerate(tokens)
    ]
    return np.stack(rows)


@functools.cache
def greedy_answer(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Computes the greedy answer without a scheduler: the whole text anew for every token."""
    runner, tokens = shared_runner(), list(prompt)
    for _ in range(num_tokens):
        pages = list(range(-(-len(tokens) // PAGE_SIZE)))
        for start in range(0, len(tokens), CHUNK_TOKENS):
            result = runner.run([Chunk(tokens[start : start + CHUNK_TOKENS], start, pages)])
        tokens.append(int(np.argmax(np.asarray(result.logits)[0])))
    return tokens[len(prompt) :]


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Log-probabilities in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


unique_name = map("request-{}".format, itertools.count()).__next__
