# SPDX-License-Identifier: Apache-2.0
"""A ragged batch with its paged pool, and dense attention over it in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(kw_only=True)
class PagedBatch:
    """Arguments of ragged paged attention.

    Attributes:
        q: [rows, q_heads, head_dim]; rows behind the last sequence are padding.
        kv_pages: [num_pages, page_size, 2 * kv_heads, head_dim]; NaN wherever no sequence has
            a token.
        kv_lens: [sequences].
        page_indices: [sequences, max_pages].
        cu_q_lens: [sequences + 1].
        num_seqs: [1].
    """

    q: Floats
    kv_pages: Floats
    kv_lens: Ints
    page_indices: Ints
    cu_q_lens: Ints
    num_seqs: Ints

    @classmethod
    def random(
        cls,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 8,
        page_size: int = 16,
        rows: int | None = None,
        sequences: int | None = None,
        seed: int = 0,
    ) -> PagedBatch:
        """Draws a batch.

        Args:
            lengths: New tokens and tokens in all, of each sequence.
            heads: Query and KV heads.
            head_dim: Size of a head.
            page_size: Tokens per page.
            rows: Rows with padding; None for no padding.
            sequences: Sequences with padding; None for no padding.
            seed: Of the random numbers.

        Returns:
            The batch; pages lie in random order.
        """
        rng = np.random.default_rng(seed)
        rows = rows or sum(new for new, _ in lengths)
        sequences = sequences or len(lengths)
        counts = [-(-total // page_size) for _, total in lengths]
        max_pages = max(counts) + 3
        order = rng.permutation(sum(counts) + 5)
        pool = np.full((len(order), page_size, 2 * heads[1], head_dim), np.nan, np.float32)
        # What a page table holds behind a sequence's pages is a page like any other.
        tables = rng.integers(0, len(order), (sequences, max_pages)).astype(np.int32)
        kv_lens, cu_q_lens = np.zeros(sequences, np.int32), np.zeros(sequences + 1, np.int32)
        for i, (new, total) in enumerate(lengths):
            tables[i, : counts[i]], order = order[: counts[i]], order[counts[i] :]
            flat = rng.standard_normal((total, *pool.shape[2:]), np.float32)
            for token in range(total):
                pool[tables[i, token // page_size], token % page_size] = flat[token]
            kv_lens[i] = total
            cu_q_lens[i + 1 :] = cu_q_lens[i] + new
        return cls(
            q=rng.standard_normal((rows, heads[0], head_dim), np.float32),
            kv_pages=pool,
            kv_lens=kv_lens,
            page_indices=tables,
            cu_q_lens=cu_q_lens,
            num_seqs=np.array([len(lengths)], np.int32),
        )

    @property
    def arguments(self) -> tuple[npt.NDArray[np.generic], ...]:
        """The positional arguments of ragged_paged_attention."""
        return (
            *(self.q, self.kv_pages, self.kv_lens),
            *(self.page_indices, self.cu_q_lens, self.num_seqs),
        )

    @property
    def used_rows(self) -> int:
        """Rows that belong to a sequence."""
        return int(self.cu_q_lens[self.num_seqs[0]])

    def stored(self, dtype: str) -> tuple[npt.NDArray[np.generic], PagedBatch]:
        """Returns the pool's bits in another dtype, and the batch with the values so rounded."""
        rounded = self.kv_pages.astype(getattr(ml_dtypes, dtype))
        bits = rounded.view(f"uint{8 * rounded.itemsize}")
        return bits, dataclasses.replace(self, kv_pages=rounded.astype(np.float32))

    def dense(self, sm_scale: float) -> Floats:
        """Computes attention one row and one head at a time, in float64.

        Args:
            sm_scale: Factor on the scores.

        Returns:
            [used_rows, q_heads, head_dim].
        """
        _, page_size, combined, head_dim = self.kv_pages.shape
        group = 2 * self.q.shape[1] // combined
        out = np.zeros((self.used_rows, *self.q.shape[1:]))
        for i in range(self.num_seqs[0]):
            total, start, end = self.kv_lens[i], self.cu_q_lens[i], self.cu_q_lens[i + 1]
            pages = self.page_indices[i, : -(-total // page_size)]
            kv = self.kv_pages[pages].reshape(-1, combined, head_dim).astype(np.float64)
            for row in range(start, end):
                visible = total - (end - start) + (row - start) + 1
                for head in range(self.q.shape[1]):
                    k = kv[:visible, 2 * (head // group)]
                    v = kv[:visible, 2 * (head // group) + 1]
                    scores = k @ self.q[row, head].astype(np.float64) * sm_scale
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights @ v / weights.sum()
        return out.astype(np.float32)
