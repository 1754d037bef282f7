# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a paged KV pool.

The life of one request here:

1. `submit` (any thread) validates it, counts it against the bound, and puts it into the inbox.
2. The step thread takes it out and calls `accept`, which queues it for prefill (WAITING).
3. It is admitted, oldest first, when there is a running slot and pages for it and for the growth
   of everybody else (`admission.py`): PREFILLING.
4. Each prefill step computes up to `chunk_tokens` tokens of the admitted prompts. With the last
   chunk comes the first token: `on_prefill_done`, which by default calls `adopt`: RUNNING.
5. Each decode step gives every running sequence one token. Prefill and decode steps alternate when
   there is work for both. A sequence that needs a page when none is free takes those of the
   youngest, which goes back to 3 and is computed again, its answer so far included.
6. `finish` ends it: `on_abort` if it failed, `on_release`, slot and pages back, last output, in
   this order. FINISHED.

An abort finds a request in any of these places. What fails for one request alone (its callback,
its text, its logits) ends that request. Anything else that raises on the step thread ends all of
them with status 500, sets `failure`, and the scheduler takes no more.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial

from absl import logging

from kvferry.engine.batching import prefill_work
from kvferry.engine.boundary import guarded
from kvferry.engine.output import AnswerText
from kvferry.engine.request import FinishReason, Request
from kvferry.engine.runner import ModelRunner
from kvferry.engine.sampler import Sampler
from kvferry.engine.scheduler_base import SchedulerBase, SchedulerTokenizer
from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.engine.scheduler_stats import SchedulerStats
from kvferry.engine.sequence import Sequence, SequenceState
from kvferry.engine.step_executor import StepExecutor, StepOutcome, StepWork

_DETOKENIZER_CONTEXT = 8
"""Prompt tokens the detokenizer sees, so that the first word keeps the space before it."""


class QueueFullError(RuntimeError):
    """The server has as many requests as it takes; try again later (HTTP 503)."""


class SchedulerStoppedError(QueueFullError):
    """The scheduler is draining, stopped, or failed (HTTP 503)."""


class Scheduler(SchedulerBase):
    """Runs requests on a model; see the module's docstring.

    Attributes:
        num_steps: steps run so far; grows while the queue moves.
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
        super().__init__(runner, tokenizer, limits, sampler=sampler, clock=clock)
        self.num_steps = 0
        self._checked = 0
        self._tickets = itertools.count(1)
        self._executor = StepExecutor(runner, self.sampler)
        self._prefilled_last = False

    # From any thread.

    def validate(self, request: Request) -> None:
        """Checks a request against the model's limits.

        Args:
            request: what came in.

        Raises:
            ValueError: the request can never be served; the message is for the client.
        """
        self.request_limits.check(request)

    def submit(self, request: Request) -> int:
        """Takes a request in. Its outputs come through `request.on_output`.

        Args:
            request: what came in.

        Returns:
            A ticket that names exactly this request, for `abort_ticket`.

        Raises:
            ValueError: see `validate`.
            QueueFullError: there are too many requests already.
            SchedulerStoppedError: the scheduler takes no more work.
        """
        self.validate(request)
        detokenizer = self.tokenizer.detokenizer(
            request.params.skip_special_tokens, request.prompt_ids[-_DETOKENIZER_CONTEXT:]
        )
        answer = AnswerText(detokenizer, request.params, self._eos_ids)
        limit = self.generation_limit(request)
        with self._condition:
            if self._refusing:
                raise SchedulerStoppedError("the server is shutting down or has failed")
            if self._num_live >= self.limits.max_live_requests:
                raise QueueFullError(
                    f"{self._num_live} requests are in progress or queued, which is the limit; "
                    "try again later"
                )
            self._num_live += 1
            seq = Sequence(request, next(self._tickets), limit, answer)
            self._hand_in(partial(self._take_in, seq))
        return seq.ticket

    def abort(
        self,
        request_id: str,
        *,
        prefix: bool = False,
        message: str = "aborted by the client",
        status: int = 400,
    ) -> None:
        """Ends all requests of a name, wherever they are; unknown names are ignored.

        Args:
            request_id: the name, as submitted.
            prefix: end those whose name begins with it; "" then means all.
            message: for the client.
            status: HTTP status for the client.
        """

        def matches(seq: Sequence) -> bool:
            name = seq.request_id
            return name.startswith(request_id) if prefix else name == request_id

        self.call_soon(partial(self._abort_matching, matches, message, status))

    def abort_ticket(
        self, ticket: int, *, message: str = "aborted by the client", status: int = 400
    ) -> None:
        """Ends exactly one request, wherever it is; one that ended already is ignored.

        Args:
            ticket: what `submit` returned.
            message: for the client.
            status: HTTP status for the client.
        """
        self.call_soon(
            partial(self._abort_matching, lambda seq: seq.ticket == ticket, message, status)
        )

    def stats(self) -> SchedulerStats:
        """Returns a snapshot of the numbers; its parts may be of adjacent moments."""
        queues = self._queues
        totals = {f"{name}_total": value for name, value in vars(self._counters).items()}
        totals["finished_total"] = dict(self._counters.finished)
        return SchedulerStats(
            live=self._num_live,
            waiting=queues.count(SequenceState.WAITING),
            prefilling=queues.count(SequenceState.PREFILLING),
            running=queues.count(SequenceState.RUNNING),
            held=queues.count(SequenceState.HELD),
            num_tokens=queues.num_tokens(),
            num_pages=self.allocator.num_pages,
            used_pages=self.allocator.used_pages,
            used_slots=self.limits.max_running_requests - self.free_slots,
            max_slots=self.limits.max_running_requests,
            max_live=self.limits.max_live_requests,
            **totals,
        )

    # The step thread.

    def turn(self) -> float | None:
        """Takes in what other threads handed over, polls, and runs at most one step."""
        self._empty_inbox()
        delay = self.poll()
        preemptions = self._counters.preemptions
        self._admit_waiting()
        work = self._next_work()
        if work:
            started = self.now()
            outcomes = self._executor.execute(work)
            self._note_step(work, started)
            for outcome in outcomes:
                self._apply(outcome)
        elif self._num_live == 0 and self._checked != self._counters.accepted:
            # A page that is lost or held twice would in time be a wrong answer: better no answers.
            # Also after requests that took no step: their pages may have been filled from outside.
            self.allocator.check(used=self._num_taken)
            self._checked = self._counters.accepted
        # A preemption may have made room for somebody who waits.
        return 0.0 if work or preemptions != self._counters.preemptions else delay

    def wind_down(self, failure: Exception | None) -> None:
        """Ends every live sequence at the end of the thread."""
        reason = FinishReason("abort", message="the server is shutting down", status=503)
        if failure is not None:
            reason = FinishReason("abort", message=f"the engine failed: {failure!r}", status=500)
        for seq in self.live():
            # A hook may be what failed: every client still gets its answer.
            guarded(partial(self._run_end_hooks, seq, reason), f"the end of {seq.request_id!r}")
            self._end(seq, reason, None)

    def _take_in(self, seq: Sequence) -> None:
        self._queues.add(seq)
        self._counters.accepted += 1
        if not self.closed:
            self.accept(seq)

    def _admit_waiting(self) -> None:
        while (seq := self._queues.oldest_waiting()) is not None and self.admit(seq):
            self._queues.move(seq, SequenceState.PREFILLING)

    def _next_work(self) -> list[StepWork]:
        """Alternates between prompts and answers when there are both."""
        for prefill in (not self._prefilled_last, self._prefilled_last):
            work = self._prefill_work() if prefill else self._decode_work()
            if work:
                self._prefilled_last = prefill
                return work
        return []

    def _prefill_work(self) -> list[StepWork]:
        return prefill_work(
            self._queues.prefilling,
            max_tokens=self.limits.chunk_tokens,
            max_sequences=self.runner.sizes.prefill_sequences,
            page_size=self._admission.page_size,
        )

    def _decode_work(self) -> list[StepWork]:
        """Gets every running sequence the page of its next token, the oldest first."""
        for seq in sorted(self._queues.running, key=lambda seq: seq.ticket):
            while seq.state is SequenceState.RUNNING:
                if self._admission.try_grow(seq, seq.num_computed + 1):
                    break
                candidates = (*self._queues.running, *self._queues.prefilling)
                self._preempt(max(candidates, key=lambda other: other.ticket))
        return [StepWork(seq, 1) for seq in self._queues.running]

    def _preempt(self, seq: Sequence) -> None:
        logging.info("request %r gives up its %d pages", seq.request_id, len(seq.pages))
        self._admission.release(seq)
        self._admission.note_preemption()
        self._counters.preemptions += 1
        self._queues.move(seq, SequenceState.WAITING)
        self.on_preempt(seq)

    def _note_step(self, work: list[StepWork], started: float) -> None:
        now = self.now()
        self.num_steps += 1
        self._counters.step_seconds += now - started
        if self._prefilled_last:
            self._counters.prefill_steps += 1
            self._counters.prompt_tokens += sum(item.count for item in work)
        else:
            self._counters.decode_steps += 1
            self._admission.note_decode_step()
        for item in work:
            item.seq.mark("prefill_start" if self._prefilled_last else "decode_start", started)
            item.seq.last_progress_seconds = now

    def _apply(self, outcome: StepOutcome) -> None:
        seq = outcome.seq
        if seq.finished:
            return  # a callback or hook of a sequence before it in the batch ended it
        if outcome.failure:
            self.abort_sequence(seq, outcome.failure, 500)
        elif outcome.token is None:
            self.on_prefill_chunk(seq)
        elif seq.state is SequenceState.PREFILLING:
            seq.mark("prefill_done", self.now())
            self.on_prefill_done(seq, outcome.token)
        else:
            self._extend(seq, outcome.token)

    def _abort_matching(
        self, matches: Callable[[Sequence], bool], message: str, status: int
    ) -> None:
        for seq in self.live():
            if matches(seq):
                self.abort_sequence(seq, message, status)
