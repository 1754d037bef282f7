# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a decode server: pages arrive, answers are generated from them.

A request goes through two stages before it runs:

1. PREALLOCATE: waits, in order of arrival, until the pool has room for all of its prompt's pages
   and a reserve to grow. The prefill server is found and introduced meanwhile.
2. TRANSFER: its pages are reserved and asked for; they are written on the step thread as they
   arrive. With the last of them comes the first token, and the request joins the running batch as
   if its prompt had been computed here.

A sequence that loses its pages to others later is computed again by this server: its engine can
prefill too.
"""

import dataclasses
import enum
from typing import Any

from kvferry.control.connection import KVManager, KVReceiver
from kvferry.control.handover_stats import HandoverStats
from kvferry.control.kv_poll import KVPoll
from kvferry.control.prompt_digest import PROMPT_DIGEST, prompt_digest
from kvferry.engine.request import FinishReason, SampledToken, TokenLogprob
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.sequence import Sequence

# Transfers move without an event: while requests wait for their slots, the step thread looks.
_QUEUE_POLL_SECONDS = 0.5


class _Stage(enum.Enum):
    PREALLOCATE = "preallocate"
    TRANSFER = "transfer"


@dataclasses.dataclass(eq=False)
class _Leg:
    """A request and its half of the connection, until it runs."""

    seq: Sequence
    receiver: KVReceiver
    stage: _Stage = _Stage.PREALLOCATE


class DecodeScheduler(Scheduler):
    """Takes KV caches over from prefill servers and generates from them."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Takes the arguments of `Scheduler`; call `connect` before `start`."""
        super().__init__(*args, **kwargs)
        self._manager: KVManager | None = None
        self._default_bootstrap_port = 0
        self._progress_seen = (0, 0, 0.0)
        self._num_ended = 0
        self._legs: dict[int, _Leg] = {}
        self.handovers = HandoverStats()

    def connect(self, manager: KVManager, default_bootstrap_port: int) -> None:
        """Sets the connection backend; its `on_event` must call this scheduler's `wake`.

        Args:
            manager: the backend, started.
            default_bootstrap_port: for requests that name no port.
        """
        self._manager = manager
        self._default_bootstrap_port = default_bootstrap_port

    def accept(self, seq: Sequence) -> None:
        """Opens the decode leg of the request's room; the peer is looked up from now on."""
        assert self._manager is not None, "connect() comes before start()"
        bootstrap = seq.request.bootstrap
        if bootstrap is None:
            self.abort_sequence(seq, "the request has no bootstrap_room: send it to a router", 400)
            return
        port = bootstrap.port or self._default_bootstrap_port
        try:
            receiver = self._manager.open_receiver(bootstrap.host, port, bootstrap.room)
        except ValueError as error:
            self.abort_sequence(seq, str(error), 400)
            return
        self.hold(seq)
        self._legs[seq.ticket] = _Leg(seq, receiver)

    def poll(self) -> float | None:
        """Reserves for those whose turn it is, and takes in what has arrived."""
        blocked = False
        for leg in list(self._legs.values()):
            # Once the oldest that waits finds no room, nobody behind it may take what it waits for.
            self._advance(leg, may_admit=not blocked)
            waits = leg.stage is _Stage.PREALLOCATE and not leg.seq.finished
            blocked = blocked or waits
        self._report_progress()
        return _QUEUE_POLL_SECONDS if blocked else super().poll()

    def _report_progress(self) -> None:
        """Whatever brings those with a slot nearer to their end helps those that wait for one.

        That is a step, a slot that was given back (also by answers that took no step), and whatever
        moves a transfer: data that arrives, or a prefill server that is busy with others.
        """
        waiting = [leg for leg in self._legs.values() if leg.stage is _Stage.PREALLOCATE]
        if not waiting:
            return
        transfers = (leg for leg in self._legs.values() if leg.stage is _Stage.TRANSFER)
        moved = max((leg.receiver.timing.progress for leg in transfers), default=0.0)
        seen = (self.num_steps, self._num_ended, moved)
        if seen != self._progress_seen:
            self._progress_seen = seen
            for leg in waiting:
                leg.receiver.mark_progress()

    def _advance(self, leg: _Leg, may_admit: bool) -> None:
        if leg.receiver.poll() is KVPoll.Failed:
            failure = leg.receiver.failure
            assert failure is not None
            self.abort_sequence(leg.seq, failure.reason, failure.status)
        elif leg.stage is _Stage.PREALLOCATE:
            if may_admit and self.admit(leg.seq):
                leg.seq.mark("reserved", self.now())
                leg.stage = _Stage.TRANSFER
                leg.receiver.request(
                    leg.seq.pages,
                    prompt_tokens=leg.seq.prompt_len,
                    extra={PROMPT_DIGEST: prompt_digest(leg.seq.request.prompt_ids)},
                )
        else:
            leg.receiver.commit()
            if leg.receiver.poll() is KVPoll.Success:
                self._join(leg)

    def _join(self, leg: _Leg) -> None:
        seq, metadata = leg.seq, leg.receiver.metadata
        assert metadata is not None
        seq.mark("committed", self.now())
        self.handovers.record(leg.receiver.timing, seq.marks, self.now())
        del self._legs[seq.ticket]
        logprob = None
        if metadata.first_token_logprob is not None:
            top = tuple((value, token) for value, token in metadata.top_logprobs)
            logprob = TokenLogprob(metadata.first_token_logprob, metadata.first_token, top)
        token = SampledToken(metadata.first_token, logprob)
        self.adopt(seq, token, cached_tokens=metadata.cached_tokens)

    def on_abort(self, seq: Sequence, reason: FinishReason) -> None:
        """Tells the prefill server if the request had not started to run."""
        leg = self._legs.get(seq.ticket)
        if leg is not None:
            leg.receiver.abort(reason.message, reason.status)
        super().on_abort(seq, reason)

    def on_release(self, seq: Sequence) -> None:
        """Forgets the leg."""
        self._legs.pop(seq.ticket, None)
        self._num_ended += seq.admitted
        super().on_release(seq)
