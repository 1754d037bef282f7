# SPDX-License-Identifier: Apache-2.0
"""How one request wants its tokens chosen, and when it wants to stop."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

GREEDY_TEMPERATURE = 1e-6
"""At or below this temperature the most likely token is taken; see `SamplingParams.greedy`."""

MAX_TOP_LOGPROBS = 20
"""Most alternatives a request may ask for per token; the sampler's shapes are built for it."""

MAX_STOP_STRINGS = 64
"""Each new piece of text is searched for every stop string, so their number is bounded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; validates itself.

    Lists given for `stop` and `stop_token_ids` are stored as tuples, a lone string for `stop` as a
    tuple of one, and the keys of `logit_bias` as ints.

    Attributes:
        max_new_tokens: most tokens to generate; None means up to the context limit. 0 computes
            the prompt only (useful with prompt log-probabilities).
        temperature: logits are divided by it; at most `GREEDY_TEMPERATURE` means greedy.
        top_k: only the k most likely tokens are candidates; -1 or 0 means all. Tokens that tie
            with the k-th stay in, except for k = 1, which is greedy.
        top_p: only the most likely tokens whose summed probability reaches this are candidates;
            in (0, 1]. Like top_k it looks at the distribution after temperature, and neither
            filter re-normalises for the other. Ties with the last candidate stay in.
        min_p: only tokens at least this fraction as likely as the most likely one are
            candidates; in [0, 1].
        repetition_penalty: > 0; logits of tokens seen in prompt or output are divided by it when
            positive and multiplied by it when negative. 1 is off.
        presence_penalty: subtracted once from the logit of each token seen in the output;
            in [-2, 2].
        frequency_penalty: subtracted from a logit once per occurrence in the output; in [-2, 2].
        seed: makes sampling reproducible, whatever else is in the batch; None draws one.
        stop: strings that end the answer; not part of it unless `no_stop_trim`.
        stop_token_ids: tokens that end the answer, besides the model's own end tokens.
        min_new_tokens: before this many tokens no end token can be chosen and no stop string
            ends the answer.
        ignore_eos: the model's end tokens do not end the answer (`stop_token_ids` still do).
        logit_bias: added to the logits of these token ids; values in [-100, 100].
        skip_special_tokens: special tokens give no text.
        no_stop_trim: keep the stop string, or the text of the stop token, in the answer.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    def __post_init__(self) -> None:
        """Normalises the containers and checks every field.

        Raises:
            ValueError: a field is out of its range; the message names the field and the value.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        bias = {int(token): float(value) for token, value in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        self._check_lengths()
        self._check_filters()
        self._check_penalties()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (lowest id on a tie)."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, bias or the minimum length alter the logits before sampling."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.logit_bias
            or self.min_new_tokens > 0
        )

    def _check_lengths(self) -> None:
        if self.max_new_tokens is not None:
            _require(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "at least 0")
        _require(self.min_new_tokens >= 0, "min_new_tokens", self.min_new_tokens, "at least 0")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens "
                f"{self.max_new_tokens}; lower it"
            )

    def _check_filters(self) -> None:
        finite = math.isfinite(self.temperature) and self.temperature >= 0.0
        _require(finite, "temperature", self.temperature, "a finite number, at least 0")
        _require(self.top_k >= -1, "top_k", self.top_k, "at least 1, or -1 for all tokens")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        if self.seed is not None:
            in_range = -(2**63) <= self.seed < 2**64
            _require(in_range, "seed", self.seed, "a 64-bit integer")

    def _check_penalties(self) -> None:
        rep = self.repetition_penalty
        _require(math.isfinite(rep) and rep > 0.0, "repetition_penalty", rep, "finite and above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "in [-2, 2]")
        for token, value in self.logit_bias.items():
            _require(-100.0 <= value <= 100.0, f"logit_bias[{token}]", value, "in [-100, 100]")

    def _check_stops(self) -> None:
        _require(
            len(self.stop) <= MAX_STOP_STRINGS,
            "the number of stop strings",
            len(self.stop),
            f"at most {MAX_STOP_STRINGS}",
        )
        for index, text in enumerate(self.stop):
            _require(bool(text), f"stop[{index}]", text, "a non-empty string")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks every token id named here against the model's vocabulary.

        Args:
            vocab_size: number of token ids the model has.

        Raises:
            ValueError: an id in `stop_token_ids` or `logit_bias` is negative or too large.
        """
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_ids("logit_bias", self.logit_bias, vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} has token id {token}, outside the vocabulary [0, {vocab_size})"
            )


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}; it must be {rule}")
