# SPDX-License-Identifier: Apache-2.0
"""What the routes serve: a scheduler, a tokenizer and the names of this server.

The life of one request here:

1. A route turns its body into `SequencePlan`s (`prompts.py`, `sampling.py`, `rooms.py`).
2. `Service.start` validates every sequence exactly as the client asked for it, so that a prefill
   and a decode server refuse the same requests with the same words, before either waits for the
   other. Only then is anything submitted, and on a prefill server cut down to one token.
3. Outputs arrive through the `Mailbox` at the `Call` that the route's answer waits on.
4. When the answer ends early, `Call.fail` aborts the sequences that still run.

All of it happens on the event loop, except that the step thread posts outputs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvferry.engine.request import BootstrapInfo, Request, RequestOutput
from kvferry.engine.sampling_params import SamplingParams
from kvferry.engine.scheduler import QueueFullError
from kvferry.server.call import Call, Mailbox
from kvferry.server.errors import BAD_REQUEST, UNAVAILABLE, ApiError
from kvferry.server.interfaces import EngineScheduler, ServiceOptions, TextTokenizer
from kvferry.server.metrics import MetricSample, ServerMetrics
from kvferry.server.plan import SequencePlan, count_samples, with_meetings, with_samples
from kvferry.server.prompts import PromptReader
from kvferry.server.rooms import expand_bootstrap
from kvferry.server.schemas import GenerateBody, Number, OpenAIBody

HealthCheck = Callable[[], str | None]


def _first_complaint(checks: Sequence[HealthCheck]) -> str | None:
    return next((found for check in checks if (found := check())), None)


def _ignore(*unused: object) -> None:
    """Does nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceHooks:
    """What the rest of the process adds to the server.

    Attributes:
      fault_checks: each returns what only a restart of the process mends, or None; any complaint
        makes /livez and /health answer 503. Called on the event loop: they must only look.
      ready_checks: each returns why requests cannot be served for now, or None; any complaint makes
        /health answer 503. Likewise.
      collect: returns further metrics, read at every scrape of /metrics.
      refused: told of each meeting whose request is answered 503 before the scheduler knows of it,
        and why, so that the other half need not wait for it.
      state: returns further fields of /server_info's `internal_states[0]`, read at every request.
    """

    fault_checks: Sequence[HealthCheck] = ()
    ready_checks: Sequence[HealthCheck] = ()
    collect: Callable[[], Iterable[MetricSample]] = tuple
    refused: Callable[[BootstrapInfo, str], None] = _ignore
    state: Callable[[], Mapping[str, object]] = dict


class Service:
    """Serves requests with a scheduler that somebody else runs.

    Args:
      scheduler: where requests go.
      tokenizer: the model's tokenizer.
      options: names and limits.
      hooks: what the rest of the process adds.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        tokenizer: TextTokenizer,
        options: ServiceOptions,
        hooks: ServiceHooks | None = None,
    ):
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.options = options
        self.hooks = hooks or ServiceHooks()
        self.prompts = PromptReader(tokenizer, options.max_context)
        self.metrics = ServerMetrics(scheduler.stats, self.hooks.collect)
        self.started_at = int(time.time())
        self._not_ready: str | None = "starting"
        self._mailbox: Mailbox | None = None
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()

    def set_ready(self) -> None:
        """Lets requests in. Any thread."""
        self._not_ready = None

    def set_not_ready(self, reason: str) -> None:
        """Answers requests and /health with 503 from now on. Any thread.

        Args:
          reason: why, e.g. "compiling 3 of 12" or "shutting down".
        """
        self._not_ready = reason

    def fault(self) -> str | None:
        """Returns what only a restart of the process mends, or None."""
        failure = self.scheduler.failure
        if failure is not None:
            return f"the step thread ended: {type(failure).__name__}: {failure}"
        return _first_complaint(self.hooks.fault_checks)

    def unavailable(self) -> str | None:
        """Returns why requests cannot be served now, or None when they can."""
        found = self._not_ready or self.fault()
        if found is None and not self.scheduler.healthy:
            found = "the step thread does not run"
        return found or _first_complaint(self.hooks.ready_checks)

    def require_available(self) -> None:
        """Refuses a request while the server cannot serve it.

        Raises:
          ApiError: 503 with the reason.
        """
        reason = self.unavailable()
        if reason is not None:
            raise ApiError(f"the server is not available: {reason}", UNAVAILABLE)

    def expand(
        self, plans: Sequence[SequencePlan], n: Number | None, body: GenerateBody | OpenAIBody
    ) -> list[SequencePlan]:
        """Turns one plan per prompt into one per sequence, each with its own meeting.

        Args:
          plans: one per prompt.
          n: answers wanted per prompt, or None for 1.
          body: the request's bootstrap fields; ignored by a server that is not paired.

        Returns:
          The sequences, the samples of a prompt side by side.

        Raises:
          ApiError: 400 if `n` or a bootstrap field is wrong, or one is missing on a paired server.
        """
        samples = count_samples(n, len(plans), self.options.max_sequences)
        expanded = with_samples(plans, samples)
        if self.options.role == "null":
            return expanded
        return with_meetings(expanded, expand_bootstrap(body, len(plans), samples))

    def start(self, plans: Sequence[SequencePlan]) -> Call:
        """Validates the sequences of a request and submits them all, or none.

        Args:
          plans: the sequences.

        Returns:
          The call on whose results the answer is built.

        Raises:
          ApiError: 400 if the engine can never serve one of them; 503 if its queue is full or the
            server is not available.
        """
        try:
            self.require_available()
        except ApiError as error:
            self._refuse(plans, error)
            raise
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        tickets: list[int] = []

        def abort(index: int, message: str, status: int) -> None:
            if index < len(tickets):
                self.scheduler.abort_ticket(tickets[index], message=message, status=status)

        call = Call(
            [plan.public_id for plan in plans],
            [len(plan.prompt_ids) for plan in plans],
            abort,
            self.metrics.observe,
        )
        requests = [
            self._validated(plan, functools.partial(self._mailbox.post, call, index))
            for index, plan in enumerate(plans)
        ]
        try:
            for request in requests:
                tickets.append(self.scheduler.submit(self._for_role(request)))
        except QueueFullError as error:
            refusal = ApiError(str(error), UNAVAILABLE)
            call.fail(refusal)
            self._refuse(plans[len(tickets) :], refusal)
            raise refusal from error
        self._calls.add(call)
        return call

    def abort(self, rid: str) -> int:
        """Aborts the requests that a client named so.

        The answer is 400, not 503: a router must not repeat what was aborted on purpose.

        Args:
          rid: the request's id, or the id of one sequence of it.

        Returns:
          How many requests were aborted.
        """
        named = [call for call in self._calls if call.goes_by(rid) and not call.over]
        for call in named:
            call.fail(ApiError(f"request {rid!r} was aborted", BAD_REQUEST))
        return len(named)

    def abort_all(self, reason: str, status: int = UNAVAILABLE) -> int:
        """Aborts every running request.

        Args:
          reason: what the clients are told.
          status: the HTTP status they get.

        Returns:
          How many requests were aborted.
        """
        running = [call for call in self._calls if not call.over]
        for call in running:
            call.fail(ApiError(reason, status))
        return len(running)

    def default_length(self, default: int, prompt_tokens: int) -> int:
        """Returns how much to generate when a request does not say.

        Args:
          default: the route's default.
          prompt_tokens: length of the prompt.

        Returns:
          The default, less if the context has less room. (A length that the client names itself
          is not cut but refused.)
        """
        return min(default, max(1, self.options.max_context - prompt_tokens))

    def new_id(self) -> str:
        """Returns a fresh id for a request that brings none."""
        return secrets.token_hex(16)

    def close(self) -> None:
        """Ends what the service started; the scheduler is not its own."""
        self.prompts.close()

    def _validated(self, plan: SequencePlan, on_output: Callable[[RequestOutput], None]) -> Request:
        try:
            request = Request(
                request_id=plan.public_id,
                prompt_ids=plan.prompt_ids,
                params=plan.params,
                on_output=on_output,
                return_logprob=plan.return_logprob,
                top_logprobs_num=plan.top_logprobs_num,
                logprob_start_len=plan.logprob_start_len,
                bootstrap=plan.bootstrap,
            )
            self.scheduler.validate(request)
        except ValueError as error:
            raise ApiError(str(error)) from error
        return request

    def _refuse(self, plans: Sequence[SequencePlan], error: ApiError) -> None:
        for plan in plans:
            if plan.bootstrap is not None:
                self.hooks.refused(plan.bootstrap, error.message)

    def _for_role(self, request: Request) -> Request:
        if self.options.role == "prefill":
            return dataclasses.replace(request, params=_one_token(request.params))
        if self.options.role == "decode":
            # The prefill server answers the prompt's log-probabilities; the router merges them.
            return dataclasses.replace(request, logprob_start_len=-1)
        return request


def _one_token(params: SamplingParams) -> SamplingParams:
    most = 1 if params.max_new_tokens is None else min(1, params.max_new_tokens)
    # A minimum above 1 still has to keep end tokens away from the first token.
    least = min(most, params.min_new_tokens)
    return dataclasses.replace(params, max_new_tokens=most, min_new_tokens=least)
