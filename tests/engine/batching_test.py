# SPDX-License-Identifier: Apache-2.0
"""Tests of how prompts are cut into steps."""

import hypothesis
from hypothesis import strategies

from kvferry.engine.batching import prefill_work
from kvferry.engine.sequence import Sequence
from kvferry.tests.engine.admission_test import make


def cut(seqs: list[Sequence], max_tokens: int = 32, max_sequences: int = 3) -> list[int]:
    work = prefill_work(seqs, max_tokens=max_tokens, max_sequences=max_sequences, page_size=4)
    assert [item.seq for item in work] == seqs[: len(work)]
    return [item.count for item in work]


def test_short_prompts_share_a_step() -> None:
    assert cut([make(5, 1), make(7, 1), make(20, 1)]) == [5, 7, 20]


def test_a_chunk_ends_at_a_page_boundary() -> None:
    assert cut([make(5, 1), make(7, 1), make(21, 1)]) == [5, 7, 20]
    assert cut([make(29, 1), make(50, 1)]) == [29], "three tokens do not fill a page"
    assert cut([make(80, 1)]) == [32]


def test_number_of_sequences_is_bounded() -> None:
    assert cut([make(1, 1) for _ in range(5)]) == [1, 1, 1]


def test_nothing_to_do() -> None:
    assert cut([]) == []


@hypothesis.given(
    strategies.lists(strategies.integers(1, 90), min_size=1, max_size=6),
    strategies.integers(4, 40),
)
def test_every_prompt_is_computed_in_the_end(lengths: list[int], max_tokens: int) -> None:
    seqs = [make(length, 1) for length in lengths]
    for _ in range(sum(lengths)):
        pending = [seq for seq in seqs if seq.num_computed < seq.num_tokens]
        if not pending:
            break
        work = prefill_work(pending, max_tokens=max_tokens, max_sequences=3, page_size=4)
        assert work and sum(item.count for item in work) <= max_tokens
        for item in work:
            assert item.count > 0
            assert item.end == item.seq.num_tokens or item.end % 4 == 0
            item.seq.num_computed = item.end
    assert all(seq.num_computed == seq.num_tokens for seq in seqs)
