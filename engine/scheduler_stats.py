# SPDX-License-Identifier: Apache-2.0
"""Numbers about a scheduler, for metrics, load balancing and tests."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass
class SchedulerCounters:
    """What only grows. Written by the step thread.

    Attributes:
        accepted: requests taken in.
        finished: requests ended, by kind of finish reason.
        prompt_tokens: prompt tokens whose KV was computed here, recomputation included.
        generated_tokens: tokens given to clients.
        preemptions: times a sequence lost its pages to another.
        prefill_steps: steps that computed prompts.
        decode_steps: steps that extended answers.
        step_seconds: time spent in all steps.
    """

    accepted: int = 0
    finished: dict[str, int] = dataclasses.field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0}
    )
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    step_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """A snapshot; see `SchedulerCounters` for the fields ending in `_total`.

    Attributes:
        live: requests accepted and not ended.
        waiting: of these, queued for prefill.
        prefilling: whose prompt is being computed.
        running: in the decode batch.
        held: with a disaggregation mixin.
        num_tokens: tokens that live requests have, prompts and answers together.
        num_pages: pages in the pool.
        used_pages: pages handed out.
        used_slots: running slots taken.
        max_slots: running slots in all.
        max_live: requests accepted at most at a time; one more is refused.
    """

    live: int
    waiting: int
    prefilling: int
    running: int
    held: int
    num_tokens: int
    num_pages: int
    used_pages: int
    used_slots: int
    max_slots: int
    max_live: int
    accepted_total: int
    finished_total: Mapping[str, int]
    prompt_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    prefill_steps_total: int
    decode_steps_total: int
    step_seconds_total: float

    @property
    def queued(self) -> int:
        """Live requests without a running slot."""
        return max(0, self.live - self.used_slots)
