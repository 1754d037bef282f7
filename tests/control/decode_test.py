# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a decode server, opposite a real prefill scheduler."""

import dataclasses
import time
from collections.abc import Sequence

from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.tests.control.pairs import QUICK, wait_until
from kvferry.tests.control.scheduler_pair import SchedulerPair, finish_of, scheduler_pair
from kvferry.tests.engine.driving import Answer, greedy_answer, random_prompt

_ONE_SLOT = SchedulerLimits(max_running_requests=1)
_QUICK = dataclasses.replace(QUICK, progress_timeout_seconds=2.0)
_PACE_SECONDS = 0.4


def _one_by_one(pair: SchedulerPair, answers: Sequence[Answer]) -> None:
    """Lets pulls arrive at a pace until all is over; two that arrive together are no fault."""

    def over() -> bool:
        return all(answer.finish for answer in answers)

    def at_pull() -> bool:
        return over() or pair.managers[1].counters()["pending_pulls"] > 0

    while not over():
        wait_until(at_pull)
        time.sleep(_PACE_SECONDS)  # The pace of a slow server; nothing is waited for.
        before = pair.decode.handovers.count
        pair.network.set(held=False)
        wait_until(lambda before=before: over() or pair.decode.handovers.count > before)  # type: ignore[misc]
        pair.network.set(held=True)


def test_answers_are_those_of_one_server() -> None:
    with scheduler_pair() as pair:
        prompts = [random_prompt(length) for length in (1, 4, 33, 80)]
        answers = [pair.submit(prompt) for prompt in prompts]
        for prompt, (first, answer) in zip(prompts, answers, strict=True):
            assert finish_of(first, answer) == ["length", "length"]
            assert answer.token_ids == greedy_answer(tuple(prompt), 8)
            assert first.token_ids == answer.token_ids[:1]
        pair.wait_at_rest()


def test_a_burst_of_one_token_answers_waits_for_its_turn() -> None:
    """Decode takes no step at all, yet its queue moves: by hand-overs."""
    with scheduler_pair(options=_QUICK, decode_limits=_ONE_SLOT) as pair:
        assert finish_of(*pair.submit(random_prompt(5), max_new_tokens=1)) == ["length"] * 2
        pair.network.set(held=True)
        burst = [pair.submit(random_prompt(5, seed), max_new_tokens=1) for seed in range(12)]
        started = time.monotonic()
        _one_by_one(pair, [answer for answers in burst for answer in answers])
        for answers in burst:
            assert finish_of(*answers) == ["length", "length"]
        # Or nothing would be shown.
        assert time.monotonic() - started > 1.5 * _QUICK.progress_timeout_seconds
        assert pair.decode.num_steps == 0
        pair.network.set(held=False)
        pair.wait_at_rest()


def test_the_queue_moves_while_data_arrives_for_those_before_it() -> None:
    """A pull may take longer than the progress timeout, as long as it brings something."""
    with scheduler_pair(options=_QUICK, decode_limits=_ONE_SLOT) as pair:
        assert finish_of(*pair.submit(random_prompt(5), max_new_tokens=1)) == ["length"] * 2
        pair.network.set(held=True)
        slow = pair.submit(random_prompt(5))
        wait_until(lambda: pair.managers[1].counters()["pending_pulls"] > 0)
        queued = pair.submit(random_prompt(6))
        started = time.monotonic()

        def moved() -> bool:
            pair.network.progress += 1
            assert not queued[0].finish and not queued[1].finish, finish_of(*queued)
            return time.monotonic() - started > 1.5 * _QUICK.progress_timeout_seconds

        wait_until(moved)
        pair.network.set(held=False)
        assert finish_of(*slow, *queued) == ["length"] * 4
        pair.wait_at_rest()


def test_a_queue_that_stands_still_ends() -> None:
    """The reverse: nothing moves, so nobody waits for ever."""
    with scheduler_pair(options=_QUICK, decode_limits=_ONE_SLOT) as pair:
        assert finish_of(*pair.submit(random_prompt(5), max_new_tokens=1)) == ["length"] * 2
        pair.network.set(held=True)
        requests = [pair.submit(random_prompt(5, seed)) for seed in range(3)]
        for answers in requests:
            assert all("no progress in 2 s" in end for end in finish_of(*answers))
        pair.network.set(held=False)
        pair.wait_at_rest()


def test_the_pool_is_checked_although_no_step_was_taken() -> None:
    """A page that is lost in a hand-over must not wait for a step to be noticed."""
    with scheduler_pair() as pair:
        assert finish_of(*pair.submit(random_prompt(5), max_new_tokens=1)) == ["length"] * 2
        pair.wait_at_rest()

        def lose_a_page() -> None:
            pair.decode.allocator.alloc(1)

        pair.decode.call_soon(lose_a_page)
        pair.submit(random_prompt(5), max_new_tokens=1)
        wait_until(lambda: pair.decode.failure is not None)
        assert "1 pages are in use, 0 have an owner" in str(pair.decode.failure)
        assert pair.decode.num_steps == 0
