# SPDX-License-Identifier: Apache-2.0
"""Which prompt tokens the next step computes."""

from collections.abc import Sequence as Sequence_

from kvferry.engine.sequence import Sequence
from kvferry.engine.step_executor import StepWork


def prefill_work(
    prefilling: Sequence_[Sequence], *, max_tokens: int, max_sequences: int, page_size: int
) -> list[StepWork]:
    """Fills one step with the prompts being computed, in their order.

    A prompt that does not fit whole gets a chunk that ends at a page boundary, so that complete
    pages can move on while the rest is computed.

    Args:
        prefilling: sequences with tokens to compute, first come first served.
        max_tokens: most tokens of the step.
        max_sequences: most sequences of the step.
        page_size: tokens per page, at most `max_tokens`.

    Returns:
        At least one piece of work, unless `prefilling` is empty.
    """
    work: list[StepWork] = []
    left = max_tokens
    for seq in prefilling[:max_sequences]:
        count = seq.num_tokens - seq.num_computed
        if count > left:
            count = left - (seq.num_computed + left) % page_size
        if count <= 0:
            break
        work.append(StepWork(seq, count))
        left -= count
    return work
