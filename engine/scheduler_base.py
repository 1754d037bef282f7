# SPDX-License-Identifier: Apache-2.0
"""What happens to one sequence at a time: the scheduler's hooks and primitives.

`scheduler.py` adds the turns of the step thread and what other threads may call; it also tells the
life of a request.

Disaggregation changes where prompts and first tokens come from: its mixins override the hooks
(`generation_limit`, `accept`, `poll`, `on_prefill_done`, `on_preempt`, `on_abort`, `on_release`,
`has_pending`), calling `super()`, and use the primitives (`hold`, `enqueue`, `admit`, `unadmit`,
`take_pages`, `free_pages`, `adopt`, `finish`, `abort_sequence`).
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from functools import partial
from typing import Protocol

from absl import logging

from kvferry.engine.admission import Admission
from kvferry.engine.boundary import guarded
from kvferry.engine.delivery import build_output
from kvferry.engine.output import Detokenizer
from kvferry.engine.page_allocator import PageAllocator
from kvferry.engine.request import FinishReason, Request, SampledToken
from kvferry.engine.request_limits import RequestLimits
from kvferry.engine.runner import ModelRunner
from kvferry.engine.sampler import Sampler
from kvferry.engine.scheduler_limits import SchedulerLimits, resolve_limits
from kvferry.engine.scheduler_stats import SchedulerCounters
from kvferry.engine.sequence import Sequence, SequenceState
from kvferry.engine.sequence_queues import SequenceQueues
from kvferry.engine.step_loop import StepLoop


class SchedulerTokenizer(Protocol):
    """What the scheduler needs of a tokenizer."""

    eos_ids: tuple[int, ...]

    def detokenizer(
        self, skip_special_tokens: bool = True, context: Sequence_[int] = ()
    ) -> Detokenizer:
        """Returns a fresh incremental decoder for what follows the tokens of `context`."""
        ...


class SchedulerBase(StepLoop):
    """Moves sequences through their states; everything here belongs to the step thread.

    Attributes:
        runner: the model and its KV pool.
        tokenizer: gives end tokens and detokenizers.
        limits: with every default filled in.
        sampler: chooses tokens; to be warmed up together with the runner.
        request_limits: what a request may ask for.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: SchedulerTokenizer,
        limits: SchedulerLimits | None = None,
        *,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a scheduler whose thread does not run yet.

        Args:
            runner: the model.
            tokenizer: its tokenizer.
            limits: None for the defaults.
            sampler: None for one of its own.
            clock: seconds that never go backwards.

        Raises:
            ValueError: the limits ask for more than the runner is built for.
        """
        super().__init__("kvferry-step", clock)
        self.runner = runner
        self.tokenizer = tokenizer
        self.limits = resolve_limits(
            limits or SchedulerLimits(), runner.sizes, runner.pool.page_size
        )
        vocab_size = runner.config.vocab_size
        self.sampler = sampler or Sampler(vocab_size)
        self.request_limits = RequestLimits(
            max_context=runner.sizes.max_context, vocab_size=vocab_size
        )
        self._admission = Admission(
            runner.pool.num_pages, runner.pool.page_size, self.limits.max_running_requests
        )
        self._queues = SequenceQueues()
        self._counters = SchedulerCounters()
        self._eos_ids = frozenset(tokenizer.eos_ids) | frozenset(runner.config.eos_ids)
        self._num_live = 0  # guarded by the loop's condition
        self._num_taken = 0  # pages that outlive their sequences

    # Hooks.

    def generation_limit(self, request: Request) -> int:
        """Returns how many tokens this server generates for a request; from any thread.

        Args:
            request: a valid one.
        """
        return self.request_limits.answer_limit(request)

    def accept(self, seq: Sequence) -> None:
        """Decides what happens to a new request; here it queues for prefill.

        Args:
            seq: in state HELD.
        """
        self.enqueue(seq)

    def poll(self) -> float | None:
        """Runs before each step; returns the most seconds to sleep if there is no step to do."""
        return None

    def on_prefill_chunk(self, seq: Sequence) -> None:
        """Some more tokens of a prompt are computed, but not yet all.

        Args:
            seq: in state PREFILLING; `num_computed` tells how many are.
        """

    def on_prefill_done(self, seq: Sequence, token: SampledToken) -> None:
        """All tokens of a sequence are computed and the next is known; here it joins the batch.

        Args:
            seq: in state PREFILLING. After a preemption it has output already.
            token: the next token.
        """
        self.adopt(seq, token)

    def on_preempt(self, seq: Sequence) -> None:
        """A sequence lost its pages and waits for its tokens to be computed again.

        Args:
            seq: in state WAITING.
        """

    def on_abort(self, seq: Sequence, reason: FinishReason) -> None:
        """A sequence ends by failure or on request; comes before `on_release`.

        Args:
            seq: in any state but FINISHED.
            reason: kind "abort".
        """

    def on_release(self, seq: Sequence) -> None:
        """A sequence ends; called exactly once, just before its slot and pages are taken back.

        Args:
            seq: in any state but FINISHED; `take_pages` is the way to keep its pages.
        """

    def has_pending(self) -> bool:
        """Returns whether there is anything that a drain must wait for."""
        return self._num_live > 0

    # Primitives.

    @property
    def allocator(self) -> PageAllocator:
        """Bookkeeping of the pool's pages; to look at."""
        return self._admission.allocator

    @property
    def free_slots(self) -> int:
        """How many more sequences can be admitted, pages permitting."""
        return self._admission.max_slots - self._admission.used_slots

    def live(self) -> tuple[Sequence, ...]:
        """Returns all live sequences in order of arrival."""
        return self._queues.live()

    def hold(self, seq: Sequence) -> None:
        """Takes a sequence out of the queues that are stepped; the caller looks after it.

        Args:
            seq: in any state but FINISHED; keeps slot and pages.
        """
        self._queues.move(seq, SequenceState.HELD)

    def enqueue(self, seq: Sequence) -> None:
        """Queues a sequence for prefill, in order of arrival.

        Args:
            seq: in any state but FINISHED. One that is admitted keeps its slot and pages and goes
                straight on with what is not computed yet.
        """
        state = SequenceState.PREFILLING if seq.admitted else SequenceState.WAITING
        self._queues.move(seq, state)

    def admit(self, seq: Sequence) -> bool:
        """Tries to give a sequence a running slot and the pages of all its tokens.

        Args:
            seq: in state HELD or WAITING; the state stays.

        Returns:
            Whether it is admitted. False: try again when something ended. An older sequence that
            waits for admission goes first.
        """
        if seq.admitted:
            return True
        oldest = self._queues.oldest_waiting()
        if oldest is not None and oldest.ticket < seq.ticket:
            return False
        if not self._admission.try_admit(seq, self._queues.admitted()):
            return False
        seq.mark("admitted", self.now())
        return True

    def unadmit(self, seq: Sequence) -> None:
        """Takes slot and pages back from a sequence that lives on.

        Args:
            seq: in state HELD or WAITING; nothing happens if it is not admitted.

        Raises:
            ValueError: the sequence is being stepped; `hold` it first.
        """
        self.free_pages(self.take_pages(seq))

    def take_pages(self, seq: Sequence) -> list[int]:
        """Takes the slot back from a sequence, and hands its pages to the caller.

        Args:
            seq: in state HELD or WAITING; in any state within `on_abort` and `on_release`.

        Returns:
            The pages, which the caller owes to `free_pages`.

        Raises:
            ValueError: the sequence is being stepped; `hold` it first.
        """
        stepped = seq.state in (SequenceState.PREFILLING, SequenceState.RUNNING)
        if stepped and not seq.released:
            raise ValueError(
                f"request {seq.request_id!r} is {seq.state.value} and needs its pages; hold it "
                "first"
            )
        pages = self._admission.take_pages(seq)
        self._num_taken += len(pages)
        return pages

    def free_pages(self, pages: Iterable[int]) -> None:
        """Gives pages back that `take_pages` returned.

        Args:
            pages: each exactly once.

        Raises:
            ValueError: a page is free already.
        """
        returned = list(pages)
        self.allocator.free(returned)
        self._num_taken -= len(returned)

    def adopt(
        self, seq: Sequence, token: SampledToken, *, cached_tokens: int | None = None
    ) -> None:
        """Gives a sequence its next token and lets it run on, or ends it if that was the last.

        Args:
            seq: admitted, with the KV of all its tokens in its pages, computed here or pulled.
            token: chosen after these tokens.
            cached_tokens: prompt tokens that nobody had to compute; None leaves it unchanged.

        Raises:
            ValueError: its pages do not hold its tokens: it was not admitted.
        """
        if len(seq.pages) < self._admission.pages_for(seq.num_tokens):
            raise ValueError(
                f"request {seq.request_id!r} has {len(seq.pages)} pages for {seq.num_tokens} "
                "tokens; admit it first"
            )
        if cached_tokens is not None:
            seq.cached_tokens = cached_tokens
        seq.num_computed = seq.num_tokens
        if seq.state is not SequenceState.RUNNING:
            self._queues.move(seq, SequenceState.RUNNING)
        if seq.max_new_tokens == 0:
            self.finish(seq, FinishReason("length"))
        else:
            self._extend(seq, token)

    def finish(
        self, seq: Sequence, reason: FinishReason, token: SampledToken | None = None
    ) -> None:
        """Ends a sequence: hooks, slot and pages back, last output.

        Args:
            seq: in any state; nothing happens if it is FINISHED.
            reason: what the client is told.
            token: a last token for the client, added as it is, without a look for stops.
        """
        if seq.finished:
            return
        if token is not None:
            seq.append(token.token_id)
            guarded(partial(seq.answer.push, token.token_id), f"text of {seq.request_id!r}")
        self._run_end_hooks(seq, reason)
        self._end(seq, reason, token)

    def abort_sequence(self, seq: Sequence, message: str, status: int) -> None:
        """Ends a sequence by an error.

        Args:
            seq: in any state; nothing happens if it is FINISHED.
            message: for the client.
            status: HTTP status for the client, 400 or more.
        """
        self.finish(seq, FinishReason("abort", message=message, status=status))

    # How a token reaches the client, and how a sequence ends.

    def _extend(self, seq: Sequence, token: SampledToken) -> None:
        """Adds a token to a running sequence, tells the client, and ends it if that was all."""
        seq.append(token.token_id)
        seq.mark("first_token", self.now())
        reason, error = guarded(
            partial(seq.answer.push, token.token_id), f"text of {seq.request_id!r}"
        )
        if error is not None:
            self.abort_sequence(seq, f"the answer cannot be decoded: {error!r}", 500)
            return
        if reason is None and len(seq.output_ids) >= seq.max_new_tokens:
            reason = seq.answer.close() or FinishReason("length")
        if reason is None:
            self._deliver(seq, token, None)
        else:
            self._run_end_hooks(seq, reason)
            self._end(seq, reason, token)

    def _run_end_hooks(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.released:
            return
        seq.released = True
        if reason.kind == "abort":
            logging.info("request %r is aborted: %s", seq.request_id, reason.message)
            self.on_abort(seq, reason)
        self.on_release(seq)

    def _end(self, seq: Sequence, reason: FinishReason, token: SampledToken | None) -> None:
        self._admission.release(seq)
        self._queues.move(seq, SequenceState.FINISHED)
        seq.mark("finish", self.now())
        self._counters.finished[reason.kind] += 1
        with self._condition:
            self._num_live -= 1
        guarded(seq.answer.close, f"last text of {seq.request_id!r}")
        self._deliver(seq, token, reason)

    def _deliver(
        self, seq: Sequence, token: SampledToken | None, finish: FinishReason | None
    ) -> None:
        self._counters.generated_tokens += token is not None
        output = build_output(seq, token, finish)
        _, error = guarded(
            partial(seq.request.on_output, output), f"on_output of {seq.request_id!r}"
        )
        if error is not None:
            self.abort_sequence(seq, f"the answer cannot be delivered: {error!r}", 500)
