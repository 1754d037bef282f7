# SPDX-License-Identifier: Apache-2.0
"""Tests of text, stops and holding back, on a real byte-level tokenizer."""

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from kvferry.engine.output import AnswerText, StopMatcher
from kvferry.engine.request import FinishReason
from kvferry.engine.sampling_params import SamplingParams
from kvferry.tests.engine.tiny import EOS_ID, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = frozenset({EOS_ID})


def answer(**fields: Any) -> AnswerText:
    params = SamplingParams(**fields)
    return AnswerText(TOKENIZER.detokenizer(params.skip_special_tokens), params, EOS)


def run(ids: list[int], **fields: Any) -> tuple[list[str], FinishReason | None, int]:
    """Pushes tokens until one ends the answer; returns the pieces, the reason, tokens used."""
    text, pieces = answer(**fields), []
    for count, token in enumerate(ids, start=1):
        reason = text.push(token)
        pieces.append(text.take())
        if reason is not None:
            assert text.close() is None
            assert text.take() == "", "nothing comes after the end"
            return pieces, reason, count
    reason = text.close()
    pieces.append(text.take())
    return pieces, reason, len(ids)


def of(text: str) -> list[int]:
    return list(text.encode())


def test_plain_text_streams_at_once() -> None:
    pieces, reason, _ = run(of("abc"))
    assert pieces == ["a", "b", "c", ""]
    assert reason is None


def test_end_token_ends_and_gives_no_text() -> None:
    pieces, reason, used = run([*of("ab"), EOS_ID, *of("c")])
    assert "".join(pieces) == "ab"
    assert reason == FinishReason("stop", matched=EOS_ID)
    assert used == 3


def test_end_token_as_first_token() -> None:
    pieces, reason, used = run([EOS_ID])
    assert (pieces, reason, used) == ([""], FinishReason("stop", matched=EOS_ID), 1)


def test_ignored_end_token_goes_on() -> None:
    pieces, reason, _ = run([*of("a"), EOS_ID, *of("b")], ignore_eos=True)
    assert ("".join(pieces), reason) == ("ab", None)
    pieces, _, _ = run([*of("a"), EOS_ID], ignore_eos=True, skip_special_tokens=False)
    assert "".join(pieces) == "a<eos>"


def test_stop_token_is_trimmed_unless_asked_for() -> None:
    ids = of("a.b")
    assert run(ids, stop_token_ids=(ord("."),)) == (
        ["a", ""],
        FinishReason("stop", matched=ord(".")),
        2,
    )
    pieces, _, _ = run(ids, stop_token_ids=(ord("."),), no_stop_trim=True)
    assert "".join(pieces) == "a."
    _, reason, _ = run(ids, stop_token_ids=(ord("."),), ignore_eos=True)
    assert reason is not None, "ignore_eos is about the model's own end tokens only"


def test_stop_string_over_several_tokens_is_never_shown() -> None:
    pieces, reason, used = run(of("say END now"), stop=("END",))
    assert pieces == ["s", "a", "y", " ", "", "", ""]
    assert reason == FinishReason("stop", matched="END")
    assert used == 7


def test_held_back_text_comes_when_it_was_no_stop() -> None:
    pieces, reason, _ = run(of("a EN x"), stop=("END",))
    assert pieces == ["a", " ", "", "", "EN ", "x", ""]
    assert reason is None
    pieces, _, _ = run(of("a EN"), stop=("END",))
    assert pieces[-1] == "EN", "the end of the answer gives out what was held back"


def test_stop_string_inside_one_token() -> None:
    the = TOKENIZER.encode(" the")
    assert len(the) == 1
    pieces, reason, _ = run([*of("x"), *the], stop=("h",))
    assert "".join(pieces) == "x t"
    assert reason == FinishReason("stop", matched="h")
    pieces, _, _ = run([*of("x"), *the], stop=("h",), no_stop_trim=True)
    assert "".join(pieces) == "x th"


def test_no_stop_trim_keeps_the_string_and_holds_nothing_back() -> None:
    pieces, reason, _ = run(of("aEND"), stop=("END",), no_stop_trim=True)
    assert pieces == ["a", "E", "N", "D"]
    assert reason == FinishReason("stop", matched="END")


def test_first_to_complete_wins_and_then_the_longest() -> None:
    _, reason, _ = run(of("xabcd"), stop=("abcd", "bc"))
    assert reason == FinishReason("stop", matched="bc")
    pieces, reason, _ = run(of("xabc"), stop=("bc", "abc", "c"))
    assert reason == FinishReason("stop", matched="abc")
    assert "".join(pieces) == "x"


def test_stop_string_of_a_character_in_two_tokens() -> None:
    pieces, reason, used = run(of("aé!"), stop=("é",))
    assert ("".join(pieces), used) == ("a", 3)
    assert reason == FinishReason("stop", matched="é")


def test_end_token_inside_a_character() -> None:
    pieces, reason, _ = run([*of("a"), "é".encode()[0], EOS_ID])
    assert "".join(pieces) == "a\ufffd"
    assert reason == FinishReason("stop", matched=EOS_ID)


def test_last_half_character_may_complete_a_stop() -> None:
    pieces, reason, _ = run([*of("a"), "é".encode()[0]], stop=("\ufffd",))
    assert "".join(pieces) == "a"
    assert reason == FinishReason("stop", matched="\ufffd")


def test_minimum_length_ignores_stops() -> None:
    pieces, reason, used = run(of("xx.x.x"), stop=(".",), min_new_tokens=4)
    assert ("".join(pieces), used) == ("xx.x", 5)
    assert reason == FinishReason("stop", matched=".")
    _, _, used = run(of("abcd"), stop=("cd",), min_new_tokens=4)
    assert used == 4, "a stop string may have begun before"


def test_self_overlapping_stop() -> None:
    pieces, reason, _ = run(of("aaab"), stop=("aab",))
    assert "".join(pieces) == "a"
    assert reason == FinishReason("stop", matched="aab")


def test_matcher_continues_after_a_match() -> None:
    matcher = StopMatcher("abab")
    assert [matcher.feed(char) for char in "ababab"] == [False, False, False, True, False, True]


texts = strategies.text(alphabet="abcé", max_size=30)


@hypothesis.given(
    text=texts,
    stops=strategies.lists(strategies.text("abé", min_size=1, max_size=4), max_size=3),
    keep=strategies.booleans(),
)
def test_any_stop_is_found_where_it_first_completes(
    text: str, stops: list[str], keep: bool
) -> None:
    pieces, reason, _ = run(of(text), stop=tuple(stops), no_stop_trim=keep)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        assert ("".join(pieces), reason) == (text, None)
        return
    end, length = min(ends)
    assert "".join(pieces) == text[: end if keep else end + length]
    assert reason == FinishReason("stop", matched=text[end + length : end])


@hypothesis.given(strategies.lists(strategies.integers(0, 262), max_size=40))
def test_pieces_joined_are_the_decoded_answer(ids: list[int]) -> None:
    pieces, _, _ = run(ids, ignore_eos=True, stop=("never\0seen",))
    assert "".join(pieces) == TOKENIZER.decode(ids)


@pytest.mark.timeout(20)
def test_long_repetitive_stop_stays_cheap() -> None:
    stop = "a" * 20000 + "b"
    pieces, reason, _ = run(of("a" * 30000), stop=(stop,))
    assert ("".join(pieces), reason) == ("a" * 30000, None)
