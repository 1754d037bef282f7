# SPDX-License-Identifier: Apache-2.0
"""One HTTP request as the sequences it asks for, before anything is submitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvferry.engine.request import BootstrapInfo
from kvferry.engine.sampling_params import SamplingParams
from kvferry.server.errors import ApiError
from kvferry.server.fields import whole
from kvferry.server.schemas import Number


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """One sequence to generate, as the client asked for it.

    Attributes:
      public_id: the id that the client sees.
      prompt_ids: the prompt as token ids.
      params: sampling and stopping rules.
      bootstrap: where prefill and decode meet; None on a server that does both.
      return_logprob: whether log-probabilities are wanted.
      top_logprobs_num: number of most likely alternatives wanted per token.
      logprob_start_len: first prompt position whose log-probability is wanted; -1 for none.
    """

    public_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    bootstrap: BootstrapInfo | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1


def count_samples(n: Number | None, prompts: int, max_sequences: int) -> int:
    """Reads the number of answers wanted per prompt.

    Args:
      n: the request's `n`, or None for 1.
      prompts: number of prompts.
      max_sequences: most sequences that one request may ask for.

    Returns:
      Answers per prompt.

    Raises:
      ApiError: 400 if `n` is below 1, or prompts times samples exceed `max_sequences`.
    """
    samples = whole("n", n)
    if samples is None:
        samples = 1
    if samples < 1:
        raise ApiError(f"n must be at least 1, is {samples}")
    if prompts * samples > max_sequences:
        raise ApiError(
            f"{prompts} prompts with n={samples} are {prompts * samples} sequences; one request may"
            f" ask for {max_sequences}"
        )
    return samples


def with_samples(plans: Sequence[SequencePlan], samples: int) -> list[SequencePlan]:
    """Repeats each prompt for `n` answers.

    Args:
      plans: one plan per prompt.
      samples: answers per prompt.

    Returns:
      `len(plans) * samples` plans, the samples of a prompt side by side. A seed is counted up from
      sample to sample, else all would be equal.
    """
    if samples == 1:
        return list(plans)
    return [_sample(plan, i) for plan in plans for i in range(samples)]


def with_meetings(
    plans: Sequence[SequencePlan], meetings: Sequence[BootstrapInfo]
) -> list[SequencePlan]:
    """Gives every sequence its meeting.

    Args:
      plans: the sequences.
      meetings: one per sequence.

    Returns:
      The sequences with their meetings.
    """
    return [
        dataclasses.replace(plan, bootstrap=meeting)
        for plan, meeting in zip(plans, meetings, strict=True)
    ]


def _sample(plan: SequencePlan, index: int) -> SequencePlan:
    params = plan.params
    if params.seed is not None:
        # Wraps within the engine's 64 bits, so that the largest seed works with n > 1 too.
        seed = (params.seed + index) % (1 << 64) if params.seed >= 0 else params.seed + index
        params = dataclasses.replace(params, seed=seed)
    return dataclasses.replace(plan, public_id=f"{plan.public_id}_{index}", params=params)
