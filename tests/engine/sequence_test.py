# SPDX-License-Identifier: Apache-2.0
"""Tests of a sequence's bookkeeping."""

import dataclasses

from kvferry.engine.output import AnswerText
from kvferry.engine.request import TokenLogprob
from kvferry.engine.sequence import Sequence
from kvferry.tests.engine.driving import Answer, make_request, shared_tokenizer


def make(prompt: list[int], **fields: object) -> Sequence:
    request = make_request(Answer(), prompt, **fields)
    answer = AnswerText(shared_tokenizer().detokenizer(), request.params, frozenset())
    return Sequence(request, 1, 8, answer)


def test_prompt_and_output_are_one_text() -> None:
    seq = make([1, 2, 3])
    for token in (4, 5):
        seq.append(token)
    assert seq.tokens(0, 5) == [1, 2, 3, 4, 5]
    assert seq.tokens(2, 4) == [3, 4]
    assert seq.tokens(3, 4) == [4]
    assert seq.tokens(4, 9) == [5]
    assert (seq.num_tokens, seq.prompt_len, seq.max_tokens) == (5, 3, 10)


def test_seed_is_kept_or_drawn() -> None:
    assert make([1], seed=7).seed == 7
    assert make([1], seed=-1).seed == 2**64 - 1
    assert make([1]).seed != make([1]).seed


def test_prompt_logprobs_are_given_once_and_whole() -> None:
    seq = make([5, 6, 7], return_logprob=True, logprob_start_len=1)
    assert seq.next_prompt_logprob == 2
    assert seq.take_prompt_logprobs() is None
    seq.add_prompt_logprob(TokenLogprob(-1.0, 7))
    assert seq.take_prompt_logprobs() == (TokenLogprob(None, 6), TokenLogprob(-1.0, 7))
    assert seq.take_prompt_logprobs() is None


def test_no_prompt_logprobs_wanted() -> None:
    for seq in (make([5, 6]), make([5, 6], logprob_start_len=0)):
        assert seq.next_prompt_logprob == 2
        assert seq.take_prompt_logprobs() is None
    at_the_end = make([5, 6], return_logprob=True, logprob_start_len=2)
    assert at_the_end.take_prompt_logprobs() == ()


def test_the_first_mark_of_a_stage_counts() -> None:
    seq = make([1])
    seq.mark("stage", 5.0)
    seq.mark("stage", 9.0)
    assert seq.marks["stage"] == 5.0
    assert seq.last_progress_seconds == 9.0


def test_requests_are_immutable() -> None:
    request = make([1]).request
    assert dataclasses.is_dataclass(request)
    assert isinstance(request.prompt_ids, tuple)
