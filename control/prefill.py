# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a prefill server: prompts are computed here, then their pages leave.

A request goes through four stages, each a queue of its own:

1. BOOTSTRAP: waits until the decode server asks for the pages. Asking means that it has reserved
   room for them: that is the credit on which this server works, so nothing is computed before.
2. PREFILL: in the engine's own queue, then computed in chunks like any prompt. Pages that are
   complete leave while the next chunk is computed.
3. HAND_OVER: computed; waits while too many bytes are published already (back-pressure), in all or
   to its decode server.
4. IN_FLIGHT: gathered and published, its pages are back in the pool; answers its HTTP request with
   its one token when the decode server has acknowledged.
"""

import dataclasses
import enum
from collections.abc import Hashable
from typing import Any

from kvferry.control.connection import KVManager, KVSender
from kvferry.control.handover_stats import HandoverStats
from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import KVMetadata
from kvferry.control.prompt_digest import PROMPT_DIGEST, prompt_digest
from kvferry.engine.request import FinishReason, Request, SampledToken
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.sequence import Sequence

# Data arrives without an event for the step thread. While computed prompts wait, it looks.
_QUEUE_POLL_SECONDS = 0.5


class _Stage(enum.Enum):
    BOOTSTRAP = "bootstrap"
    PREFILL = "prefill"
    HAND_OVER = "hand_over"
    IN_FLIGHT = "in_flight"


@dataclasses.dataclass(eq=False)
class _Leg:
    """A request and its half of the connection; `token` is set once the prompt is computed."""

    seq: Sequence
    sender: KVSender
    stage: _Stage = _Stage.BOOTSTRAP
    pages_sent: int = 0
    token: SampledToken | None = None


class PrefillScheduler(Scheduler):
    """Computes prompts and hands their KV cache to the decode servers that asked for them."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Takes the arguments of `Scheduler`; call `connect` before `start`."""
        super().__init__(*args, **kwargs)
        self._manager: KVManager | None = None
        self._max_chunk_pages: int | None = None
        self._legs: dict[int, _Leg] = {}
        self._progress_seen = (0, 0, 0, 0.0)
        self._num_ended = 0
        self.handovers = HandoverStats()

    def connect(self, manager: KVManager, max_chunk_pages: int | None = None) -> None:
        """Sets the connection backend; its `on_event` must call this scheduler's `wake`.

        Args:
          manager: the backend, started.
          max_chunk_pages: most pages handed over in one piece; None: a prompt is one piece.
        """
        self._manager = manager
        self._max_chunk_pages = max_chunk_pages

    def generation_limit(self, request: Request) -> int:
        """One token: the rest is the decode server's."""
        return min(1, super().generation_limit(request))

    def accept(self, seq: Sequence) -> None:
        """Opens the prefill leg of the request's room and waits to be asked for its pages."""
        assert self._manager is not None, "connect() comes before start()"
        bootstrap = seq.request.bootstrap
        if bootstrap is None:
            self.abort_sequence(seq, "the request has no bootstrap_room: send it to a router", 400)
            return
        try:
            sender = self._manager.open_sender(bootstrap.room)
        except ValueError as error:
            self.abort_sequence(seq, str(error), 400)
            return
        self.hold(seq)
        self._legs[seq.ticket] = _Leg(seq, sender)

    def poll(self) -> float | None:
        """Moves every request on whose peer has moved."""
        blocked: set[Hashable] = set()
        for leg in list(self._legs.values()):
            # Once the oldest finds no room for its pages, nobody behind it may take that room, but
            # for those of other decode servers: one that stands still holds up its own only.
            self._advance(leg, may_send=leg.sender.peer not in blocked)
            if leg.stage is _Stage.HAND_OVER and not leg.seq.finished:
                blocked.add(leg.sender.peer)
        self._report_progress()
        return _QUEUE_POLL_SECONDS if blocked else super().poll()

    def _report_progress(self) -> None:
        """Whatever brings a leg nearer to its end helps all that wait behind it, computed or not.

        That is a step, a leg that has ended, acknowledged bytes, and data that arrives.
        """
        waiting = [
            leg for leg in self._legs.values() if leg.stage in (_Stage.PREFILL, _Stage.HAND_OVER)
        ]
        if not waiting:
            return
        timings = {leg: leg.sender.timing for leg in self._legs.values()}
        num_bytes = sum(timing.num_bytes for timing in timings.values())
        # Not of those that wait: what is marked here must not count as progress again.
        flying = (timings[leg].progress for leg in timings if leg.stage is _Stage.IN_FLIGHT)
        seen = (self.num_steps, self._num_ended, num_bytes, max(flying, default=0.0))
        if seen != self._progress_seen:
            self._progress_seen = seen
            for leg in waiting:
                leg.sender.mark_progress()

    def _advance(self, leg: _Leg, may_send: bool) -> None:
        state = leg.sender.poll()
        if state is KVPoll.Failed:
            failure = leg.sender.failure
            assert failure is not None
            self.abort_sequence(leg.seq, failure.reason, failure.status)
        elif leg.stage is _Stage.BOOTSTRAP and state >= KVPoll.WaitingForInput:
            self._start_prefill(leg)
        elif leg.stage is _Stage.HAND_OVER:
            if may_send:
                self._hand_over(leg)
        elif leg.stage is _Stage.IN_FLIGHT and state is KVPoll.Success:
            self.handovers.record(leg.sender.timing, leg.seq.marks, self.now())
            self.finish(leg.seq, FinishReason("length"), leg.token)

    def _start_prefill(self, leg: _Leg) -> None:
        wanted = leg.sender.request
        assert wanted is not None
        seq = leg.seq
        if wanted.prompt_tokens != seq.prompt_len:
            message = (
                f"the decode server counts {wanted.prompt_tokens} prompt tokens, this prefill"
                f" server {seq.prompt_len}: do both serve the same model and tokenizer?"
            )
            self.abort_sequence(seq, message, 500)
            return
        if wanted.extra.get(PROMPT_DIGEST) != prompt_digest(seq.request.prompt_ids):
            message = (
                f"the decode server has another prompt of {seq.prompt_len} tokens: do both have the"
                " same tokenizer and chat template, and was the room used once only?"
            )
            self.abort_sequence(seq, message, 500)
            return
        pages = -(-seq.prompt_len // self.runner.pool.page_size)
        if wanted.first_page + wanted.num_pages != pages:
            message = (
                f"the decode server asks for pages {wanted.first_page} to"
                f" {wanted.first_page + wanted.num_pages} of a prompt of {pages} pages"
            )
            self.abort_sequence(seq, message, 500)
            return
        seq.mark("credit", self.now())
        leg.stage = _Stage.PREFILL
        self.enqueue(seq)

    def on_prefill_chunk(self, seq: Sequence) -> None:
        """Hands over the pages that are complete, unless a computed prompt waits for that room."""
        if not self._somebody_waits_to_send():
            # A page may be there again after a preemption; it is sent once.
            self._send(self._legs[seq.ticket], seq.num_computed // self.runner.pool.page_size)

    def on_prefill_done(self, seq: Sequence, token: SampledToken) -> None:
        """Takes the computed prompt out of the engine and hands it over."""
        leg = self._legs[seq.ticket]
        may_send = not self._somebody_waits_to_send()
        leg.token = token
        leg.stage = _Stage.HAND_OVER
        self.hold(seq)
        if may_send:
            self._hand_over(leg)

    def _somebody_waits_to_send(self) -> bool:
        # Of any decode server: `poll` gives each its turn, in order of arrival.
        return any(leg.stage is _Stage.HAND_OVER for leg in self._legs.values())

    def _hand_over(self, leg: _Leg) -> None:
        seq, token, wanted = leg.seq, leg.token, leg.sender.request
        assert token is not None and wanted is not None
        logprob = token.logprob
        metadata = KVMetadata(
            first_token=token.token_id,
            prompt_tokens=seq.prompt_len,
            cached_tokens=seq.cached_tokens,
            first_token_logprob=None if logprob is None else logprob.logprob,
            top_logprobs=[] if logprob is None else list(logprob.top),
        )
        if not self._send(leg, wanted.first_page + wanted.num_pages, metadata):
            return  # Too much is published, or the leg failed: the next poll tells which.
        seq.mark("published", self.now())
        # The gather is dispatched, and the device runs in order: no later step can overtake it.
        self.unadmit(seq)
        leg.stage = _Stage.IN_FLIGHT

    def _send(self, leg: _Leg, end: int, metadata: KVMetadata | None = None) -> bool:
        """Hands over the prompt's pages up to `end`, in pieces; with the metadata it is complete.

        Returns:
            Whether all were taken.
        """
        wanted = leg.sender.request
        assert wanted is not None
        while True:
            start = wanted.first_page + leg.pages_sent
            stop = end if self._max_chunk_pages is None else min(end, start + self._max_chunk_pages)
            last = stop == end and metadata is not None
            if stop <= start and not last:
                return True
            pages = leg.seq.pages[start:stop]
            if not leg.sender.send(pages, last=last, metadata=metadata if last else None):
                return False
            leg.pages_sent += stop - start
            if last:
                return True

    def on_abort(self, seq: Sequence, reason: FinishReason) -> None:
        """Tells the decode server, whatever stage the request was in."""
        leg = self._legs.get(seq.ticket)
        if leg is not None:
            leg.sender.abort(reason.message, reason.status)
        super().on_abort(seq, reason)

    def on_release(self, seq: Sequence) -> None:
        """Forgets the leg; the engine frees the pages if the request still has any."""
        leg = self._legs.pop(seq.ticket, None)
        self._num_ended += leg is not None and leg.stage is not _Stage.BOOTSTRAP
        super().on_release(seq)
