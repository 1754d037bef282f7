# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a prefill server, opposite a real decode scheduler."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import pytest

from kvferry.control.connection import KVManager, KVReceiver
from kvferry.control.engines.base import EngineOptions, TransferError
from kvferry.control.engines.fake_engine import FakeEngine
from kvferry.control.prompt_digest import PROMPT_DIGEST, prompt_digest
from kvferry.control.zmq_connection import create_manager
from kvferry.tests.control.pairs import QUICK, commit_all, wait_until
from kvferry.tests.control.scheduler_pair import (
    SchedulerPair,
    finish_of,
    page_bytes,
    runner_layout,
    scheduler_pair,
)
from kvferry.tests.engine.driving import (
    Answer,
    greedy_answer,
    make_request,
    random_prompt,
    submit,
)
from kvferry.tests.engine.tiny import PAGE_SIZE

_QUICK = dataclasses.replace(QUICK, progress_timeout_seconds=2.0)
# Nothing may end by itself here.
_PATIENT = dataclasses.replace(QUICK, orphan_timeout_seconds=60.0, progress_timeout_seconds=60.0)
_ONE_AT_A_TIME = dataclasses.replace(_QUICK, max_published_bytes=1)


def test_pages_leave_in_pieces() -> None:
    """A prompt of 20 pages, computed in three chunks, in pieces of at most three pages."""
    with scheduler_pair(max_chunk_pages=3) as pair:
        prompt = random_prompt(80)
        first, answer = pair.submit(prompt)
        assert finish_of(first, answer) == ["length", "length"]
        assert answer.token_ids == greedy_answer(tuple(prompt), 8)
        # Of 8, 8 and 4 pages: 3 + 3 + 2 twice, then 3 + 1.
        assert pair.managers[1].counters()["chunks_received"] == 8
        pair.wait_at_rest()


def test_nothing_is_computed_before_decode_has_room() -> None:
    with scheduler_pair() as pair:
        answer = Answer()
        pair.prefill.submit(make_request(answer, random_prompt(5), bootstrap=pair.bootstrap()))
        assert "no decode server asked for room 1" in finish_of(answer)[0]
        assert pair.prefill.num_steps == 0
        pair.wait_at_rest()


def test_a_request_without_a_room_is_refused() -> None:
    with scheduler_pair() as pair:
        for scheduler in (pair.prefill, pair.decode):
            answer = submit(scheduler, random_prompt(5))
            assert finish_of(answer)[0].startswith("400 the request has no bootstrap_room")
        pair.wait_at_rest()


def test_a_room_that_is_used_twice_is_refused() -> None:
    with scheduler_pair() as pair:
        pair.network.set(held=True)
        bootstrap = pair.bootstrap()
        first = pair.submit(random_prompt(5), bootstrap=bootstrap)
        wait_until(lambda: pair.managers[1].counters()["pending_pulls"] > 0)
        second = pair.submit(random_prompt(5), bootstrap=bootstrap)
        assert all(f"400 room {bootstrap.room} is in use" in end for end in finish_of(*second))
        pair.network.set(held=False)
        assert finish_of(*first) == ["length", "length"]
        pair.wait_at_rest()


def test_two_prompts_that_differ_are_not_mixed() -> None:
    with scheduler_pair() as pair:
        for ours, theirs, word in (
            (random_prompt(5), random_prompt(6), "counts 6 prompt tokens, this prefill server 5"),
            (random_prompt(5), random_prompt(5, 1), "has another prompt of 5 tokens"),
        ):
            bootstrap, answers = pair.bootstrap(), (Answer(), Answer())
            pair.prefill.submit(make_request(answers[0], ours, bootstrap=bootstrap))
            pair.decode.submit(make_request(answers[1], theirs, bootstrap=bootstrap))
            for end in finish_of(*answers):
                assert end.startswith("500") and word in end
        pair.wait_at_rest()


def test_computed_prompts_wait_while_data_arrives_for_those_before_them() -> None:
    """Back-pressure for longer than the progress timeout, from a pull that brings something."""
    with scheduler_pair(options=_ONE_AT_A_TIME) as pair:
        assert finish_of(*pair.submit(random_prompt(5), max_new_tokens=1)) == ["length"] * 2
        pair.network.set(held=True)
        slow = pair.submit(random_prompt(5))
        wait_until(lambda: pair.managers[1].counters()["pending_pulls"] > 0)
        waiting = pair.submit(random_prompt(6))
        started = time.monotonic()

        def moved() -> bool:
            pair.network.progress += 1
            assert not waiting[0].finish and not waiting[1].finish, finish_of(*waiting)
            return time.monotonic() - started > 1.5 * _QUICK.progress_timeout_seconds

        wait_until(moved)
        pair.network.set(held=False)
        assert finish_of(*slow, *waiting) == ["length"] * 4
        pair.wait_at_rest()


def test_computed_prompts_do_not_wait_for_one_that_stands_still() -> None:
    with scheduler_pair(options=_ONE_AT_A_TIME) as pair:
        assert finish_of(*pair.submit(random_prompt(5), max_new_tokens=1)) == ["length"] * 2
        pair.network.set(held=True)
        stuck = pair.submit(random_prompt(5))
        wait_until(lambda: pair.managers[1].counters()["pending_pulls"] > 0)
        assert all("no progress in 2 s" in end for end in finish_of(*stuck))
        pair.network.set(held=False)
        assert finish_of(*pair.submit(random_prompt(6))) == ["length", "length"]
        pair.wait_at_rest()


@contextlib.contextmanager
def _standing_still(pair: SchedulerPair) -> Iterator[KVManager]:
    """Another decode server, whose control thread lives and whose step thread does nothing."""
    runner = pair.prefill.runner
    manager = create_manager(
        "decode",
        options=_PATIENT,
        layout=runner_layout(runner),
        pages=runner.pool,
        engine=FakeEngine(EngineOptions(), pair.network),
        on_event=lambda: None,
    )
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()


def test_a_decode_server_that_stands_still_holds_up_its_own_requests_only() -> None:
    """It acknowledges nothing; what is computed for it waits, and others pass."""
    options = dataclasses.replace(_PATIENT, max_published_bytes=8 * page_bytes())
    with scheduler_pair(options=options) as pair, _standing_still(pair) as still:
        prompt = random_prompt(4 * PAGE_SIZE)
        stuck: list[tuple[Answer, KVReceiver]] = []
        for _ in range(3):
            answer, bootstrap = Answer(), pair.bootstrap()
            pair.prefill.submit(make_request(answer, prompt, bootstrap=bootstrap))
            receiver = still.open_receiver("127.0.0.1", pair.bootstrap_port, bootstrap.room)
            receiver.request(
                [0, 1, 2, 3],
                prompt_tokens=len(prompt),
                extra={PROMPT_DIGEST: prompt_digest(prompt)},
            )
            stuck.append((answer, receiver))
        # Computed, but half of the limit is all that one decode server gets.
        wait_until(lambda: pair.prefill.stats().prompt_tokens_total == 3 * len(prompt))
        wait_until(lambda: pair.managers[0].counters()["published_chunks"] == 1)
        for seed in range(4):
            assert finish_of(*pair.submit(random_prompt(8, seed))) == ["length", "length"]
        assert not any(answer.finish for answer, _ in stuck)
        # It goes on: each in its turn.
        for answer, receiver in stuck:
            commit_all(receiver)
            assert finish_of(answer) == ["length"]
        pair.wait_at_rest()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("an array is deleted"), 500),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 503),
        (TransferError("out of slots"), 503),
    ],
)
def test_a_publication_that_raises_ends_its_request_only(error: Exception, status: int) -> None:
    """Both clients are told why; the others go on, and nothing stays reserved."""
    with scheduler_pair() as pair:
        assert finish_of(*pair.submit(random_prompt(5), max_new_tokens=1)) == ["length"] * 2
        engine = pair.engines[0]
        works, unlucky = engine.publish, [True]

        def publish(key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
            if unlucky:
                unlucky.clear()
                raise error
            works(key, arrays, deadline_seconds)

        engine.publish = publish  # type: ignore[method-assign]
        ends = [finish_of(*pair.submit(random_prompt(5, seed))) for seed in range(3)]
        for end in ends[0]:
            assert end.startswith(f"{status} ") and f"cannot publish pages: {error}" in end
        assert ends[1:] == [["length", "length"]] * 2
        pair.wait_at_rest()
