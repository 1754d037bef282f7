# SPDX-License-Identifier: Apache-2.0
"""From chunks of sequences to the arrays of one step.

Everything a step needs besides weights and pool is built in NumPy as one int32 vector, and the
token ids, which may be on the device already, as another: two transfers to the device per step,
and no JAX operation outside of the jitted step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.engine.attention_plan import Family
from kvferry.engine.model import StepInputs

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence.

    Attributes:
        token_ids: The new tokens, at least one.
        start: Tokens of the sequence that are in the pool already.
        pages: Pages of the sequence, enough for old and new tokens.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The compiled shape of one step.

    Attributes:
        family: Which of the two kinds of step.
        tokens: Rows.
        sequences: Sequences; equal to `tokens` for decode.
        max_pages: Width of the page table.
    """

    family: Family
    tokens: int
    sequences: int
    max_pages: int

    @property
    def packed_size(self) -> int:
        """Length of the packed vector."""
        return 2 * self.tokens + self.sequences * (2 + self.max_pages) + 2

    @property
    def label(self) -> str:
        """What to call the shape in a progress display."""
        return f"{self.family} {self.tokens}"


def pack(
    shape: StepShape, chunks: Sequence[Chunk], page_size: int, num_pages: int
) -> tuple[Ints, Ints]:
    """Builds the arrays of one step.

    Args:
        shape: A shape that holds the chunks.
        chunks: The step's work, in row order.
        page_size: Tokens per page.
        num_pages: Pages in the pool.

    Returns:
        The token ids, shape [shape.tokens], int32; and everything else, shape
        [shape.packed_size], int32, as `unpack` reads it.

    Raises:
        ValueError: A chunk has no tokens, a negative start, too few pages for its tokens, more
            pages than the shape takes, or pages outside of the pool.
    """
    packed = np.zeros(shape.packed_size, np.int32)
    token_ids = np.zeros(shape.tokens, np.int32)
    fields = unpack(shape, token_ids, packed)
    fields.slots[:] = num_pages * page_size
    fields.num_seqs[0] = len(chunks)
    row = 0
    for i, chunk in enumerate(chunks):
        count = len(chunk.token_ids)
        end = chunk.start + count
        pages = np.asarray(chunk.pages, np.int32)
        _check(chunk, pages, shape, page_size, num_pages)
        positions = np.arange(chunk.start, end, dtype=np.int32)
        rows = slice(row, row + count)
        fields.token_ids[rows] = chunk.token_ids
        fields.positions[rows] = positions
        fields.slots[rows] = pages[positions // page_size] * page_size + positions % page_size
        fields.kv_lens[i] = end
        used = -(-end // page_size)
        fields.page_tables[i, :used] = pages[:used]
        row += count
        fields.cu_q_lens[i + 1] = row
    fields.cu_q_lens[len(chunks) + 1 :] = row
    return token_ids, packed


def unpack(shape: StepShape, token_ids: Any, packed: Any) -> StepInputs:
    """Views the packed vector as step inputs; for NumPy arrays the fields are views.

    Args:
        shape: The step's shape.
        token_ids: Shape [shape.tokens], int32.
        packed: Shape [shape.packed_size], int32, NumPy or traced.

    Returns:
        The fields.
    """
    sizes = (
        *(shape.tokens, shape.tokens, shape.sequences),
        *(shape.sequences * shape.max_pages, shape.sequences + 1, 1),
    )
    ends = np.cumsum(sizes)
    parts = [packed[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    parts[3] = parts[3].reshape(shape.sequences, shape.max_pages)
    return StepInputs(token_ids, *parts)


def _check(chunk: Chunk, pages: Ints, shape: StepShape, page_size: int, num_pages: int) -> None:
    if not chunk.token_ids or chunk.start < 0:
        raise ValueError(
            f"a chunk needs tokens and start >= 0, got {len(chunk.token_ids)} tokens at "
            f"{chunk.start}"
        )
    needed = -(-(chunk.start + len(chunk.token_ids)) // page_size)
    if not needed <= len(pages):
        raise ValueError(
            f"tokens up to {chunk.start + len(chunk.token_ids)} need {needed} pages of "
            f"{page_size}, got {len(pages)}"
        )
    if needed > shape.max_pages:
        raise ValueError(f"{needed} pages exceed the longest sequence, {shape.max_pages} pages")
    if pages.min() < 0 or pages.max() >= num_pages:
        raise ValueError(f"pages must be in [0, {num_pages}), got {list(chunk.pages)}")
