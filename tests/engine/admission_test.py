# SPDX-License-Identifier: Apache-2.0
"""Tests of slots, pages and the reserve for growth."""

import pytest

from kvferry.engine.admission import Admission
from kvferry.engine.output import AnswerText
from kvferry.engine.request import Request
from kvferry.engine.sampling_params import SamplingParams
from kvferry.engine.sequence import Sequence
from kvferry.tests.engine.driving import shared_tokenizer


def make(prompt_len: int, max_new_tokens: int, ticket: int = 1) -> Sequence:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    answer = AnswerText(shared_tokenizer().detokenizer(), params, frozenset())
    request = Request(
        request_id="r", prompt_ids=(1,) * prompt_len, params=params, on_output=lambda output: None
    )
    return Sequence(request, ticket, max_new_tokens, answer)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert Admission(4, 4, 1).pages_for(tokens) == pages


def test_admits_with_exactly_the_pages_of_its_tokens() -> None:
    admission = Admission(10, 4, 2)
    seq = make(8, 5)
    assert admission.try_admit(seq, [])
    assert len(seq.pages) == 2 and seq.admitted
    assert admission.used_slots == 1
    admission.release(seq)
    admission.release(seq)
    assert (admission.used_slots, admission.allocator.used_pages) == (0, 0)


def test_first_step_must_fit_too() -> None:
    admission = Admission(2, 4, 2)
    assert not admission.try_admit(make(8, 5), [])
    assert admission.try_admit(make(8, 1), []), "one that never writes another token fits"


def test_alone_is_admitted_without_reserve() -> None:
    admission = Admission(4, 4, 2)
    assert admission.try_admit(make(8, 8), [])


def test_reserve_keeps_room_for_growth() -> None:
    admission = Admission(20, 4, 8)
    first = make(8, 41)
    assert admission.try_admit(first, [])
    # 10 pages of growth expected of the first, 9 of the second beyond its three: 0.4 * 19 = 7.
    second = make(8, 41, ticket=2)
    assert admission.try_admit(second, [first])
    third = make(20, 41, ticket=3)
    assert not admission.try_admit(third, [first, second])
    assert not third.pages and not third.admitted
    admission.reserve_fraction = 0.1
    assert admission.try_admit(third, [first, second])


def test_reserve_adapts() -> None:
    admission = Admission(20, 4, 8)
    start = admission.reserve_fraction
    for _ in range(1000):
        admission.note_decode_step()
    least = admission.reserve_fraction
    assert 0 < least < start
    admission.note_preemption()
    assert admission.reserve_fraction > least
    for _ in range(10):
        admission.note_preemption()
    assert admission.reserve_fraction == 1.0


def test_slots_are_bounded() -> None:
    admission = Admission(20, 4, 1)
    first, second = make(4, 1), make(4, 1, ticket=2)
    assert admission.try_admit(first, [])
    assert not admission.try_admit(second, [first])
    pages = admission.take_pages(first)
    assert admission.try_admit(second, [])
    admission.allocator.free(pages)


def test_grows_page_by_page() -> None:
    admission = Admission(3, 4, 2)
    seq = make(4, 20)
    assert admission.try_admit(seq, [])
    assert admission.try_grow(seq, 4) and len(seq.pages) == 1
    assert admission.try_grow(seq, 5) and len(seq.pages) == 2
    assert admission.try_grow(seq, 12) and len(seq.pages) == 3
    assert not admission.try_grow(seq, 13)
    assert len(seq.pages) == 3
