# SPDX-License-Identifier: Apache-2.0
"""The scheduler's mutable state of one request. Touched by the step thread only."""

import enum
import secrets

from kvferry.engine.logit_adjustment import LogitAdjustment
from kvferry.engine.output import AnswerText
from kvferry.engine.request import Request, TokenLogprob


class SequenceState(enum.Enum):
    """Where a sequence is. Exactly one queue of the scheduler holds it, named by this."""

    WAITING = "waiting"
    """Queued for prefill; has no pages."""
    PREFILLING = "prefilling"
    """Admitted; its prompt is computed chunk by chunk."""
    RUNNING = "running"
    """In the decode batch."""
    HELD = "held"
    """With whoever called `Scheduler.hold`; the scheduler does not step it."""
    FINISHED = "finished"
    """Its last output is out and its pages are back."""


class Sequence:
    """One request on its way through the scheduler.

    Attributes:
        request: what was asked for.
        ticket: position in order of arrival, unique in the process; also the exact handle for
            `Scheduler.abort_ticket`.
        state: which queue it is in; changed by the scheduler only.
        output_ids: tokens generated so far.
        pages: page ids of its KV, in order of position; changed by the scheduler only.
        admitted: whether it holds one of the running slots (and pages for its tokens).
        released: whether the hooks of its end have run.
        num_computed: tokens whose KV is in its pages.
        cached_tokens: prompt tokens whose KV was found instead of computed.
        seed: seed for sampling, drawn when the request brings none.
        max_new_tokens: most tokens it may generate, the context limit taken into account.
        answer: text of the answer and search for stops.
        adjustment: penalties and bias, once a step needed them.
        marks: seconds on the scheduler's clock at which each named stage was reached first.
        last_progress_seconds: when it last got anywhere; deadlines count from here.
    """

    def __init__(self, request: Request, ticket: int, max_new_tokens: int, answer: AnswerText):
        """Makes the state of a request that just came in; see the class for the arguments."""
        self.request = request
        self.ticket = ticket
        self.state = SequenceState.HELD
        self.output_ids: list[int] = []
        self.pages: list[int] = []
        self.admitted = False
        self.released = False
        self.num_computed = 0
        self.cached_tokens = 0
        seed = request.params.seed
        self.seed = secrets.randbits(64) if seed is None else seed & (2**64 - 1)
        self.max_new_tokens = max_new_tokens
        self.answer = answer
        self.adjustment: LogitAdjustment | None = None
        self.marks: dict[str, float] = {"arrival": request.arrival_seconds}
        self.last_progress_seconds = request.arrival_seconds
        self._prompt_logprobs: list[TokenLogprob] | None = None
        if request.wants_prompt_logprobs:
            # The first token asked for is given, not predicted.
            first = request.prompt_ids[request.logprob_start_len :][:1]
            self._prompt_logprobs = [TokenLogprob(None, token) for token in first]

    @property
    def request_id(self) -> str:
        """Id of the request; need not be unique."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_len + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """Most tokens, prompt included, whose KV it can ever need."""
        return self.prompt_len + max(self.max_new_tokens - 1, 0)

    @property
    def finished(self) -> bool:
        """Whether it ended; nothing may be done with it any more."""
        return self.state is SequenceState.FINISHED

    @property
    def next_prompt_logprob(self) -> int:
        """First prompt position whose log-probability is still to be found; may be the end."""
        if self._prompt_logprobs is None:
            return self.prompt_len
        return self.request.logprob_start_len + len(self._prompt_logprobs)

    def add_prompt_logprob(self, entry: TokenLogprob) -> None:
        """Adds the entry of position `next_prompt_logprob`.

        Args:
            entry: log-probability of that prompt token.
        """
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.append(entry)

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Returns the entries once, when all were found; None otherwise."""
        entries = self._prompt_logprobs
        if entries is None or self.next_prompt_logprob < self.prompt_len:
            return None
        self._prompt_logprobs = None
        return tuple(entries)

    def tokens(self, start: int, end: int) -> list[int]:
        """Returns the token ids at positions [start, end), prompt and output as one.

        Args:
            start: at least 0.
            end: positions from `num_tokens` on have no token yet and are left out.
        """
        prompt, offset = self.request.prompt_ids, self.prompt_len
        output = self.output_ids[max(start - offset, 0) : max(end - offset, 0)]
        return [*prompt[start:end], *output]

    def append(self, token: int) -> None:
        """Adds a generated token.

        Args:
            token: the token.
        """
        self.output_ids.append(token)
        if self.adjustment is not None:
            self.adjustment.append(token)

    def mark(self, stage: str, now: float) -> None:
        """Notes that a stage was reached, the first time only, and counts it as progress.

        Args:
            stage: name of the stage.
            now: seconds on the scheduler's clock.
        """
        self.marks.setdefault(stage, now)
        self.last_progress_seconds = now
