# SPDX-License-Identifier: Apache-2.0
"""Tests of the step thread: sleeping, waking, draining, failing; alone and with a scheduler."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvferry.engine.request import FinishReason, RequestOutput
from kvferry.engine.scheduler import Scheduler, SchedulerStoppedError
from kvferry.engine.sequence import Sequence
from kvferry.engine.step_loop import LoopStoppedError, StepLoop
from kvferry.tests.engine.driving import (
    Answer,
    assert_baseline,
    greedy_answer,
    make_request,
    make_scheduler,
    random_prompt,
    submit,
)


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.002)


class Counting(StepLoop):
    """Takes a number of turns, then sleeps."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.work = 0
        self.turns = 0
        self.delay: float | None = None
        self.ended: list[Exception | None] = []

    def turn(self) -> float | None:
        self._empty_inbox()
        self.turns += 1
        if self.work:
            self.work -= 1
            return 0.0
        return self.delay

    def has_pending(self) -> bool:
        return self.work > 0

    def wind_down(self, failure: Exception | None) -> None:
        self.ended.append(failure)

    def add(self, count: int) -> None:
        self.work += count


@pytest.fixture(name="loop")
def _loop() -> Iterator[Counting]:
    loop = Counting()
    yield loop
    loop.stop()


def test_sleeps_until_called(loop: Counting) -> None:
    loop.start()
    wait_for(lambda: loop.turns == 1)
    loop.call_soon(lambda: loop.add(5))
    wait_for(lambda: loop.turns == 7)
    assert loop.healthy
    loop.wake()
    wait_for(lambda: loop.turns == 8)


def test_wakes_up_by_itself_after_the_delay(loop: Counting) -> None:
    loop.delay = 0.01
    loop.start()
    wait_for(lambda: loop.turns > 5)


def test_a_wake_during_a_turn_is_not_lost(loop: Counting) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        go_on.wait(30)

    loop.start()
    loop.call_soon(block)
    assert inside.wait(30)
    turns = loop.turns
    loop.wake()
    go_on.set()
    wait_for(lambda: loop.turns >= turns + 2)


def test_calls_run_in_order(loop: Counting) -> None:
    seen: list[int] = []
    for number in range(100):
        loop.call_soon(partial(seen.append, number))
    loop.start()
    wait_for(lambda: len(seen) == 100)
    assert seen == list(range(100))


def test_start_and_stop_are_idempotent() -> None:
    loop = Counting()
    loop.start()
    loop.start()
    loop.stop()
    loop.stop()
    assert loop.ended == [None]
    assert not loop.healthy
    with pytest.raises(LoopStoppedError, match="cannot start again"):
        loop.start()
    loop.call_soon(lambda: loop.add(1))
    assert loop.work == 0, "nothing happens after the end"


def test_stop_without_start_ends_in_order() -> None:
    loop = Counting()
    loop.call_soon(lambda: loop.add(1))
    loop.stop()
    assert (loop.work, loop.ended) == (1, [None])


def test_drain_finishes_the_work_but_not_for_ever() -> None:
    loop = Counting()
    loop.add(50)
    loop.start()
    loop.stop(drain_seconds=60)
    assert (loop.work, loop.ended) == (0, [None])
    endless = Counting()
    endless.add(10**12)
    endless.start()
    started = time.monotonic()
    endless.stop(drain_seconds=0.1)
    assert time.monotonic() - started < 30
    assert endless.work > 0


def test_failure_is_kept_and_ends_the_loop() -> None:
    loop = Counting()

    def fail() -> None:
        raise ZeroDivisionError("boom")

    loop.start()
    loop.call_soon(fail)
    wait_for(lambda: loop.ended)
    assert isinstance(loop.failure, ZeroDivisionError)
    assert loop.ended == [loop.failure]
    assert not loop.healthy
    loop.stop()


def test_requests_from_many_threads() -> None:
    scheduler = make_scheduler()
    scheduler.start()
    answers: list[tuple[list[int], Answer]] = []

    def client(number: int) -> None:
        for length in (3, 17, 34):
            prompt = random_prompt(length, seed=number)
            answers.append((prompt, submit(scheduler, prompt)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wait_for(lambda: all(answer.finish for _, answer in answers))
    assert len(answers) == 15
    wait_for(lambda: scheduler.stats().live == 0)
    assert_baseline(scheduler)
    scheduler.stop()
    for prompt, answer in answers:
        assert answer.token_ids == greedy_answer(tuple(prompt), 8)


def test_idle_scheduler_sleeps() -> None:
    scheduler = make_scheduler()
    scheduler.start()
    answer = submit(scheduler, random_prompt(5))
    wait_for(lambda: answer.finish)
    start, used = time.monotonic(), time.process_time()
    time.sleep(1.0)  # what is measured is this second
    used, elapsed = time.process_time() - used, time.monotonic() - start
    assert used / elapsed < 0.02, f"{used:.3f} s of CPU time in {elapsed:.2f} s"
    scheduler.stop()


def test_scheduler_drains() -> None:
    scheduler = make_scheduler()
    answers = [submit(scheduler, random_prompt(length), max_new_tokens=20) for length in (3, 40)]
    scheduler.start()
    scheduler.stop(drain_seconds=60)
    assert [answer.finish for answer in answers] == [FinishReason("length")] * 2
    assert_baseline(scheduler)


def test_scheduler_aborts_what_a_drain_leaves() -> None:
    class Stuck(Scheduler):
        def accept(self, seq: Sequence) -> None:
            self.hold(seq)

    scheduler = make_scheduler(Stuck)
    answer = submit(scheduler, random_prompt(3))
    scheduler.start()
    scheduler.stop(drain_seconds=0.05)
    assert answer.finish is not None
    assert (answer.finish.kind, answer.finish.status) == ("abort", 503)
    assert_baseline(scheduler)


@pytest.mark.parametrize("where", ["accept", "poll", "on_prefill_done", "on_release"])
def test_failure_answers_everybody_and_refuses_more(where: str) -> None:
    class Failing(Scheduler):
        pass

    def fail(self: Scheduler, *args: object) -> None:
        raise RuntimeError(f"broken {where}")

    setattr(Failing, where, fail)
    scheduler = make_scheduler(Failing)
    counts = (9, 20, 20, 20, 20, 20)  # only the hook at the end lets any of them run
    answers = [submit(scheduler, random_prompt(5), max_new_tokens=count) for count in counts]
    scheduler.start()
    wait_for(lambda: all(answer.finish for answer in answers))
    for answer in answers:
        assert answer.finish is not None
        assert (answer.finish.kind, answer.finish.status) == ("abort", 500)
        assert f"broken {where}" in answer.finish.message
    wait_for(lambda: scheduler.closed)
    assert isinstance(scheduler.failure, RuntimeError)
    assert not scheduler.healthy
    with pytest.raises(SchedulerStoppedError):
        submit(scheduler, random_prompt(5))
    scheduler.stop()
    assert_baseline(scheduler)


def test_callback_may_abort_others() -> None:
    scheduler = make_scheduler()

    class Aborting(Answer):
        def __call__(self, output: RequestOutput) -> None:
            super().__call__(output)
            scheduler.abort("other")

    aborting = Aborting()
    other = submit(scheduler, random_prompt(5), request_id="other", max_new_tokens=100)
    scheduler.submit(make_request(aborting, random_prompt(6)))
    scheduler.start()
    wait_for(lambda: aborting.finish and other.finish)
    assert other.finish is not None and other.finish.kind == "abort"
    assert aborting.finish == FinishReason("length")
    scheduler.stop()
