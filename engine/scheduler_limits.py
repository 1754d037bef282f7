# SPDX-License-Identifier: Apache-2.0
"""What an operator may limit further than the runner is built for."""

import dataclasses

from kvferry.engine.runner_options import RunnerSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Limits of a scheduler.

    Attributes:
        max_queued_requests: requests accepted beyond the running slots; at least 0.
        max_running_requests: running slots; 0 for the runner's largest decode batch.
        chunk_tokens: most prompt tokens in a step; 0 for the runner's largest prefill step.
    """

    max_queued_requests: int = 256
    max_running_requests: int = 0
    chunk_tokens: int = 0

    @property
    def max_live_requests(self) -> int:
        """Requests in progress and queued together; one more is refused."""
        return self.max_running_requests + self.max_queued_requests


def resolve_limits(limits: SchedulerLimits, sizes: RunnerSizes, page_size: int) -> SchedulerLimits:
    """Fills in the defaults.

    Args:
        limits: what the operator chose.
        sizes: what the runner is built for.
        page_size: tokens per page.

    Returns:
        Limits without zeros standing for defaults.

    Raises:
        ValueError: a limit is negative, more than the runner takes, or a chunk holds no page.
    """
    resolved = dataclasses.replace(
        limits,
        max_running_requests=limits.max_running_requests or sizes.decode_batches[-1],
        chunk_tokens=limits.chunk_tokens or sizes.prefill_tokens[-1],
    )
    most = {
        "max_queued_requests": (0, 2**31),
        "max_running_requests": (1, sizes.decode_batches[-1]),
        "chunk_tokens": (min(page_size, sizes.prefill_tokens[-1]), sizes.prefill_tokens[-1]),
    }
    for name, (low, high) in most.items():
        value = getattr(resolved, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; this runner takes {low} to {high}")
    return resolved
