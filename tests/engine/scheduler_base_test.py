# SPDX-License-Identifier: Apache-2.0
"""Tests of how sequences end, of hooks and primitives, and of a pair of servers made of them."""

import functools
from typing import Any

import pytest

from kvferry.engine.request import FinishReason, Request, RequestOutput, SampledToken
from kvferry.engine.runner import ModelRunner
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.engine.sequence import Sequence, SequenceState
from kvferry.tests.engine.driving import (
    Answer,
    assert_baseline,
    drive,
    greedy_answer,
    make_request,
    make_scheduler,
    random_prompt,
    shared_sampler,
    shared_tokenizer,
    submit,
    take_turns,
)
from kvferry.tests.engine.tiny import EOS_ID, PAGE_SIZE, tiny_model, tiny_runner


def expected(prompt: list[int], count: int) -> list[int]:
    return greedy_answer(tuple(prompt), count)


@pytest.mark.parametrize("state", ["inbox", "waiting", "prefilling", "running", "preempted"])
def test_abort_in_every_state(state: str) -> None:
    scheduler = make_scheduler()
    prompts, count = [random_prompt(length, seed=2) for length in (30, 22, 37, 33)], 45
    others = [submit(scheduler, prompt, max_new_tokens=count) for prompt in prompts]
    if state == "waiting":
        take_turns(scheduler, lambda: scheduler.stats().running > 0)
    if state == "preempted":
        take_turns(scheduler, lambda: scheduler.stats().preemptions_total > 0)
        victim = next(
            answer
            for answer, seq in zip(others, scheduler.live(), strict=True)
            if seq.state.value == "waiting"
        )
        others.remove(victim)
        prompts = [prompt for prompt in prompts if prompt is not prompts[victim.ticket - 1]]
    else:
        if state in ("prefilling", "running"):
            drive(scheduler, *others)
        victim = submit(scheduler, random_prompt(70), request_id="victim")
        wanted = {"waiting": "waiting", "prefilling": "prefilling", "running": "running"}
        if state in wanted:
            find = functools.partial(state_of, scheduler, victim.ticket)
            take_turns(scheduler, lambda: find() == wanted[state])
    scheduler.abort_ticket(victim.ticket, message="gone", status=400)
    scheduler.turn()
    assert victim.finish == FinishReason("abort", message="gone", status=400)
    scheduler.abort_ticket(victim.ticket)
    drive(scheduler, *others)
    for prompt, answer in zip(prompts, others, strict=False):
        assert answer.token_ids == expected(prompt, count)
    assert_baseline(scheduler)


def state_of(scheduler: Any, ticket: int) -> str:
    """Returns the state of a live request, "" if it is not live."""
    return next((seq.state.value for seq in scheduler.live() if seq.ticket == ticket), "")


def test_abort_by_name() -> None:
    scheduler = make_scheduler()
    names = ["a", "a", "ab", "b"]
    answers = [submit(scheduler, random_prompt(5), request_id=name) for name in names]
    scheduler.turn()
    scheduler.abort("a")
    scheduler.abort("unknown")
    scheduler.turn()
    assert [bool(answer.finish) for answer in answers] == [True, True, False, False]
    scheduler.abort("a", prefix=True, status=503, message="cleared")
    scheduler.turn()
    assert answers[2].finish == FinishReason("abort", message="cleared", status=503)
    drive(scheduler, answers[3])
    assert answers[3].finish == FinishReason("length")
    assert_baseline(scheduler)


def test_same_name_again_while_the_first_is_live() -> None:
    scheduler = make_scheduler()
    first = submit(scheduler, random_prompt(5), request_id="same")
    second = submit(scheduler, random_prompt(6), request_id="same")
    scheduler.turn()
    scheduler.abort_ticket(first.ticket)
    drive(scheduler, first, second)
    assert second.token_ids == expected(random_prompt(6), 8)


def test_callback_that_raises_ends_only_its_request() -> None:
    scheduler = make_scheduler()

    class Broken(Answer):
        def __call__(self, output: RequestOutput) -> None:
            super().__call__(output)
            raise OSError("the client is gone")

    broken = Broken()
    scheduler.submit(make_request(broken, random_prompt(5)))
    answer = submit(scheduler, random_prompt(7))
    drive(scheduler, answer, broken)
    assert answer.token_ids == expected(random_prompt(7), 8)
    assert broken.finish is not None and broken.finish.kind == "abort"
    assert len(broken.outputs) == 2
    assert_baseline(scheduler)


def test_text_that_cannot_be_decoded_ends_only_its_request() -> None:
    class Detokenizer:
        def push(self, ids: list[int]) -> str:
            raise RuntimeError(f"no text for {ids}")

        def flush(self) -> str:
            raise RuntimeError("no text")

    class Broken:
        eos_ids = (EOS_ID,)

        def detokenizer(self, skip_special_tokens: bool = True, context: Any = ()) -> Any:
            if skip_special_tokens:
                return shared_tokenizer().detokenizer(skip_special_tokens)
            return Detokenizer()

    scheduler = make_scheduler()
    scheduler.tokenizer = Broken()
    broken = submit(scheduler, random_prompt(5), skip_special_tokens=False)
    answer = submit(scheduler, random_prompt(7))
    drive(scheduler, answer, broken)
    assert broken.finish is not None
    assert (broken.finish.kind, broken.finish.status) == ("abort", 500)
    assert "cannot be decoded: RuntimeError" in broken.finish.message
    assert answer.finish == FinishReason("length")
    assert_baseline(scheduler)


def test_release_comes_once_and_before_the_last_output() -> None:
    events: list[str] = []

    class Watched(Scheduler):
        def on_abort(self, seq: Sequence, reason: FinishReason) -> None:
            events.append(f"abort {seq.request_id}")
            super().on_abort(seq, reason)

        def on_release(self, seq: Sequence) -> None:
            assert not seq.finished
            events.append(f"release {seq.request_id} {bool(seq.pages)}")
            super().on_release(seq)

    class Noted(Answer):
        def __call__(self, output: RequestOutput) -> None:
            super().__call__(output)
            if output.finish:
                events.append(f"output {output.request_id} {scheduler.stats().used_pages}")

    scheduler = make_scheduler(Watched)
    done, gone = Noted(), Noted()
    scheduler.submit(make_request(done, random_prompt(5), request_id="done", max_new_tokens=2))
    drive(scheduler, done)
    scheduler.submit(make_request(gone, random_prompt(5), request_id="gone"))
    scheduler.turn()
    scheduler.abort("gone")
    scheduler.turn()
    assert events == [
        *("release done True", "output done 0"),
        *("abort gone", "release gone True", "output gone 0"),
    ]


class Prefill(Scheduler):
    """Waits for a credit, computes prompts, hands pages over, answers one token when they went."""

    def __init__(self, runner: ModelRunner, **limits: Any) -> None:
        super().__init__(
            runner, shared_tokenizer(), SchedulerLimits(**limits), sampler=shared_sampler()
        )
        self.bootstrap: dict[int, Sequence] = {}
        self.published: dict[int, tuple[Sequence, list[Any], SampledToken]] = {}

    def generation_limit(self, request: Request) -> int:
        return min(1, super().generation_limit(request))

    def accept(self, seq: Sequence) -> None:
        assert seq.request.bootstrap is None
        self.hold(seq)
        self.bootstrap[int(seq.request_id)] = seq

    def credit(self, room: int) -> None:
        self.enqueue(self.bootstrap.pop(room))

    def on_prefill_done(self, seq: Sequence, token: SampledToken) -> None:
        self.hold(seq)
        arrays = self.runner.pool.gather(seq.pages)
        self.unadmit(seq)
        self.published[int(seq.request_id)] = (seq, arrays, token)

    def acknowledge(self, room: int) -> None:
        seq, _, token = self.published.pop(room)
        self.finish(seq, FinishReason("length"), token)

    def on_release(self, seq: Sequence) -> None:
        self.bootstrap.pop(int(seq.request_id), None)
        self.published.pop(int(seq.request_id), None)
        super().on_release(seq)


class Decode(Scheduler):
    """Reserves, waits for the pages, and goes on from the first token."""

    def __init__(self, runner: ModelRunner, source: Prefill) -> None:
        super().__init__(runner, shared_tokenizer(), SchedulerLimits(), sampler=shared_sampler())
        self.source = source
        self.queue: list[Sequence] = []
        self.pulling: list[Sequence] = []

    def accept(self, seq: Sequence) -> None:
        self.hold(seq)
        self.queue.append(seq)

    def poll(self) -> float | None:
        while self.queue and self.admit(self.queue[0]):
            seq = self.queue.pop(0)
            assert len(seq.pages) == -(-seq.prompt_len // PAGE_SIZE)
            self.source.credit(int(seq.request_id))
            self.pulling.append(seq)
        for seq in list(self.pulling):
            room = int(seq.request_id)
            if room in self.source.published:
                _, arrays, token = self.source.published[room]
                self.runner.pool.scatter(arrays, seq.pages)
                self.pulling.remove(seq)
                self.source.acknowledge(room)
                self.adopt(seq, token, cached_tokens=0)
        return super().poll()

    def on_release(self, seq: Sequence) -> None:
        if seq in self.queue:
            self.queue.remove(seq)
        if seq in self.pulling:
            self.pulling.remove(seq)
        super().on_release(seq)


class Pair:
    """Both halves, each with a pool of its own."""

    def __init__(self) -> None:
        self.prefill = Prefill(prefill_runner())
        self.decode = Decode(decode_runner(), self.prefill)
        self.rooms = 0

    def submit(self, prompt: list[int], **fields: Any) -> tuple[Answer, Answer]:
        self.rooms += 1
        first, second = Answer(), Answer()
        for scheduler, answer in ((self.prefill, first), (self.decode, second)):
            request = make_request(answer, prompt, request_id=str(self.rooms), **fields)
            answer.ticket = scheduler.submit(request)
        return first, second

    def drive(self, *answers: Answer) -> None:
        for _ in range(3000):
            if all(answer.finish for answer in answers):
                return
            self.prefill.turn()
            self.decode.turn()
        raise AssertionError("not finished")


@functools.cache
def prefill_runner() -> ModelRunner:
    return tiny_runner(tiny_model(), num_pages=48)


@functools.cache
def decode_runner() -> ModelRunner:
    return tiny_runner(tiny_model(), num_pages=40)


def test_pair_answers_like_one_server() -> None:
    pair = Pair()
    prompts = [random_prompt(length, seed=7) for length in (1, 3, 4, 5, 31, 33, 64, 80)]
    answers = [pair.submit(prompt, max_new_tokens=9, return_logprob=True) for prompt in prompts]
    pair.drive(*(answer for both in answers for answer in both))
    for prompt, (first, second) in zip(prompts, answers, strict=True):
        assert second.token_ids == expected(prompt, 9)
        assert first.token_ids == second.token_ids[:1]
        assert first.finish == FinishReason("length")
        assert first.logprobs == second.logprobs[:1] and len(second.logprobs) == 9
        assert second.outputs[-1].completion_tokens == 9
    assert_baseline(pair.prefill)
    assert_baseline(pair.decode)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.2, "frequency_penalty": 1.0, "min_new_tokens": 5, "ignore_eos": False},
        # Few candidates, so that each token chosen counts for all that follow.
        {"frequency_penalty": 2.0, "logit_bias": dict.fromkeys(range(10, 14), 30.0)},
    ],
)
def test_pair_samples_like_one_server(fields: dict[str, Any]) -> None:
    prompt = random_prompt(21, seed=8)
    fields = {"temperature": 1.0, "max_new_tokens": 20} | fields
    pair, single = Pair(), make_scheduler()
    for seed in range(3):
        alone = submit(single, prompt, seed=seed, **fields)
        drive(single, alone)
        _, second = pair.submit(prompt, seed=seed, **fields)
        pair.drive(second)
        assert second.token_ids == alone.token_ids
        assert second.text == alone.text


def test_pair_recomputes_what_decode_preempts() -> None:
    pair = Pair()
    prompts = [random_prompt(length, seed=2) for length in (30, 22, 37, 9, 33, 41)]
    answers = [pair.submit(prompt, max_new_tokens=45) for prompt in prompts]
    pair.drive(*(answer for both in answers for answer in both))
    assert pair.decode.stats().preemptions_total > 0
    assert pair.decode.stats().prefill_steps_total > 0
    for prompt, (_, second) in zip(prompts, answers, strict=True):
        assert second.token_ids == expected(prompt, 45)
    assert_baseline(pair.prefill)
    assert_baseline(pair.decode)


@pytest.mark.parametrize("count", [0, 1])
def test_pair_with_nothing_left_to_decode(count: int) -> None:
    pair = Pair()
    _, second = pair.submit(random_prompt(9), max_new_tokens=count)
    pair.drive(second)
    assert second.token_ids == expected(random_prompt(9), 1)[:count]
    assert pair.decode.stats().decode_steps_total == 0
    _, ended = pair.submit(random_prompt(9), logit_bias={EOS_ID: 100.0}, ignore_eos=False)
    pair.drive(ended)
    assert ended.finish == FinishReason("stop", matched=EOS_ID)
    assert pair.decode.stats().decode_steps_total == 0
    assert_baseline(pair.prefill)
    assert_baseline(pair.decode)


def test_held_sequences_are_found_by_abort() -> None:
    pair = Pair()
    first, second = pair.submit(random_prompt(9))
    pair.prefill.turn()
    assert [seq.state for seq in pair.prefill.live()] == [SequenceState.HELD]
    pair.decode.turn()
    assert pair.decode.stats().used_pages == 3, "the prompt's pages are reserved"
    for scheduler, answer in ((pair.prefill, first), (pair.decode, second)):
        scheduler.abort("1", message="left", status=400)
        scheduler.turn()
        assert answer.finish == FinishReason("abort", message="left", status=400)
        assert_baseline(scheduler)
    assert not pair.prefill.bootstrap and not pair.decode.queue and not pair.decode.pulling


class Holding(Scheduler):
    """Leaves every new request to the test."""

    def accept(self, seq: Sequence) -> None:
        self.hold(seq)


def test_pages_of_a_preempted_sequence_go_to_an_older_one_that_waits() -> None:
    scheduler = make_scheduler(Holding)
    older = submit(scheduler, random_prompt(12), max_new_tokens=2)
    full = [submit(scheduler, random_prompt(length), max_new_tokens=1) for length in (112, 20)]
    younger = submit(scheduler, random_prompt(20), max_new_tokens=20)
    scheduler.turn()
    waiting, *held, running = scheduler.live()
    assert scheduler.admit(running) and all(scheduler.admit(seq) for seq in held)
    scheduler.adopt(running, SampledToken(5))
    scheduler.enqueue(waiting)
    # The younger runs until the pool is full, and then nobody is left in the batch.
    drive(scheduler, older)
    assert older.token_ids == expected(random_prompt(12), 2)
    assert running.state is SequenceState.WAITING and younger.finish is None
    assert scheduler.turn() is None, "it sleeps as long as the others hold their pages"
    for seq in held:
        scheduler.finish(seq, FinishReason("length"))
    drive(scheduler, younger, *full)
    assert len(younger.token_ids) == 20
    assert_baseline(scheduler)


def test_admit_waits_for_slots_pages_and_older_sequences() -> None:
    scheduler = make_scheduler(Holding, max_running_requests=2)
    answers = [submit(scheduler, random_prompt(length)) for length in (5, 100, 100, 9)]
    scheduler.turn()
    small, large, other, last = scheduler.live()
    assert scheduler.admit(small) and scheduler.admit(small), "admitting twice changes nothing"
    assert scheduler.free_slots == 1
    assert scheduler.admit(large)
    assert not scheduler.admit(last), "no slot is left"
    scheduler.unadmit(small)
    assert not scheduler.admit(other), "no pages are left"
    scheduler.unadmit(large)
    scheduler.enqueue(other)
    assert not scheduler.admit(last), "an older sequence waits"
    assert scheduler.admit(small), "but it is older than that one"
    scheduler.abort("", prefix=True)
    scheduler.turn()
    assert all(answer.finish for answer in answers)
    assert_baseline(scheduler)


def test_taken_pages_outlive_their_sequence() -> None:
    kept: list[list[int]] = []

    class Keeping(Scheduler):
        def on_release(self, seq: Sequence) -> None:
            kept.append(self.take_pages(seq))

    scheduler = make_scheduler(Keeping)
    drive(scheduler, submit(scheduler, random_prompt(9), max_new_tokens=2))
    assert scheduler.stats().used_slots == 0
    assert scheduler.allocator.used_pages == len(kept[0]) == 3
    scheduler.free_pages(kept[0])
    with pytest.raises(ValueError, match="freed twice"):
        scheduler.free_pages(kept[0])
    assert_baseline(scheduler)


def test_a_lost_page_ends_the_scheduler_when_it_is_idle() -> None:
    scheduler = make_scheduler()
    scheduler.allocator.alloc(2)
    with pytest.raises(AssertionError, match="2 pages are in use, 0 have an owner"):
        drive(scheduler, submit(scheduler, random_prompt(9), max_new_tokens=2))
        scheduler.turn()


def test_misuse_is_refused() -> None:
    scheduler = make_scheduler()
    answer = submit(scheduler, random_prompt(9))
    scheduler.turn()
    (seq,) = scheduler.live()
    with pytest.raises(ValueError, match="is running and needs its pages; hold it first"):
        scheduler.unadmit(seq)
    scheduler.hold(seq)
    scheduler.unadmit(seq)
    with pytest.raises(ValueError, match="has 0 pages for 10 tokens; admit it first"):
        scheduler.adopt(seq, SampledToken(1))
    scheduler.finish(seq, FinishReason("length"))
    scheduler.finish(seq, FinishReason("stop"))
    scheduler.abort_sequence(seq, "late", 500)
    assert answer.finish == FinishReason("length"), "the first end counts"
    assert_baseline(scheduler)
