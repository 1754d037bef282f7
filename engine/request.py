# SPDX-License-Identifier: Apache-2.0
"""What goes into the scheduler and what comes out: requests, outputs and their parts.

All of it is immutable, so it may cross threads freely.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Literal

from kvferry.engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams


@dataclasses.dataclass(frozen=True)
class BootstrapInfo:
    """Where the two halves of a disaggregated request meet; opaque to the engine.

    Attributes:
        host: address of the prefill side's bootstrap server, as the router gave it.
        port: its port; None when the router did not name one.
        room: the meeting id of this one sequence.
    """

    host: str
    port: int | None
    room: int


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token under the model's raw logits.

    Attributes:
        logprob: natural logarithm of the probability; None for the first prompt token asked for.
        token_id: the token.
        top: (log-probability, token id) of the most likely tokens, best first; as many as asked.
    """

    logprob: float | None
    token_id: int
    top: tuple[tuple[float, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class SampledToken:
    """A token chosen for a sequence, here or by the peer that computed the prompt.

    Attributes:
        token_id: the token.
        logprob: its log-probability; None unless the request asked for it.
    """

    token_id: int
    logprob: TokenLogprob | None = None


@dataclasses.dataclass(frozen=True)
class FinishReason:
    """Why a request ended.

    Attributes:
        kind: "stop" (end token or stop string), "length", or "abort" (cancelled or failed).
        matched: the token id or string that stopped it; None unless kind is "stop".
        message: what went wrong; empty unless kind is "abort".
        status: the HTTP status that tells it best; 200 unless kind is "abort".
    """

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    status: int = 200


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """What one step added to a request. The last output of a request has `finish` set.

    Attributes:
        request_id: id of the request, as submitted.
        token_ids: the new tokens.
        text: the new text. May be empty while text that could become a stop string, or half a
            character, is held back. All pieces joined are the answer.
        logprobs: one entry per new token; None unless the request asked for them.
        prompt_logprobs: one entry per prompt token from `logprob_start_len` on, the first with
            logprob None. Only in the first output, and only when asked for.
        finish: None until the last output.
        prompt_tokens: length of the prompt.
        completion_tokens: tokens generated so far, these included.
        cached_tokens: prompt tokens whose KV was found instead of computed.
        marks: seconds on the scheduler's clock (`Scheduler.now`) at which the request reached
            each named stage; only in the last output.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    marks: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate.

    Attributes:
        request_id: name for logs and aborts; need not be unique (a router may repeat it while
            an earlier attempt is still winding down).
        prompt_ids: the prompt as token ids.
        params: sampling and stopping rules.
        on_output: called with each `RequestOutput`, on the scheduler's step thread: it must not
            block, and an exception from it ends only this request.
        return_logprob: report log-probabilities of the chosen tokens.
        top_logprobs_num: also report this many most likely tokens, at most `MAX_TOP_LOGPROBS`.
        logprob_start_len: first prompt position whose log-probability is reported; -1 for none.
        bootstrap: where prefill and decode meet; None when one server does both.
        arrival_seconds: when the request came in, on the `time.monotonic` clock.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    on_output: Callable[[RequestOutput], None]
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    bootstrap: BootstrapInfo | None = None
    arrival_seconds: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Checks what can be checked without knowing the model.

        Raises:
            ValueError: the prompt is empty, or a log-probability option is out of range.
        """
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        if not self.prompt_ids:
            raise ValueError("the prompt is empty: it has 0 tokens, at least 1 is needed")
        if not 0 <= self.top_logprobs_num <= MAX_TOP_LOGPROBS:
            raise ValueError(
                f"top_logprobs_num is {self.top_logprobs_num}; it must be in "
                f"[0, {MAX_TOP_LOGPROBS}]"
            )
        if not -1 <= self.logprob_start_len <= len(self.prompt_ids):
            raise ValueError(
                f"logprob_start_len is {self.logprob_start_len}; it must be in "
                f"[-1, {len(self.prompt_ids)}], the length of the prompt"
            )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked for."""
        return self.return_logprob and self.logprob_start_len >= 0

    @property
    def num_top_logprobs(self) -> int:
        """How many alternatives to report per token; 0 unless `return_logprob`."""
        return self.top_logprobs_num if self.return_logprob else 0
