# SPDX-License-Identifier: Apache-2.0
"""Attention over paged keys and values in plain XLA: what runs where no TPU kernel does.

Both functions are flash-style (Dao et al., arXiv:2205.14135): blocks of keys and values stream
through an online softmax, so that memory stays small whatever the context. The number of blocks
is a loop bound read at run time. One compiled shape therefore serves every context length, and a
step costs what its real lengths cost.

The pool is only read, and only through gathers of whole pages: a `while` loop may carry an
array that it does not write without copying it, so the pool is never copied.

Whatever lies in pages behind the end of a sequence may be anything, NaN included. Scores there
are replaced, and so are the values: a weight of zero does not silence a NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvferry.engine.attention_plan import AttentionPlan

# Finite, so that the difference of two masked scores is 0 and not NaN.
_MASKED_SCORE = -1e30
_TINY = 1e-30  # keeps the division of an empty row finite
_VALUE_SCALE = 0.5  # a power of two: multiplying and dividing by it is exact
_DECODE_BLOCK_TOKENS = 128
_PREFILL_BLOCK_TOKENS = 256
_PREFILL_BLOCK_QUERIES = 256


class _Softmax(NamedTuple):
    """An online softmax: [...] for each query, and its weighted values [..., head_dim]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...], head_dim: int) -> _Softmax:
        """Returns the state before any block."""
        return cls(
            jnp.full(shape, _MASKED_SCORE, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )

    def output(self) -> jax.Array:
        """Returns the weighted mean of the values; zeros where there was none."""
        return self.acc / (_VALUE_SCALE * jnp.maximum(self.total, _TINY))[..., None]


def decode_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    plan: AttentionPlan,
) -> jax.Array:
    """Attention of one new token per sequence over everything that the sequence has.

    The blocks of all sequences form one list, of which each iteration takes as many as there
    are sequences: the cost follows the sum of the lengths, not the longest one.

    Args:
        q: Queries, shape [sequences, q_heads, head_dim].
        kv_pages: Pool of one layer, shape [num_pages, page_size, 2 * kv_heads, head_dim].
        kv_lens: Tokens of each sequence, its new one included, shape [sequences], int32; 0 for
            a padding row, which yields zeros.
        page_indices: Pages of each sequence, shape [sequences, max_pages], int32.
        plan: Scale and dtype.

    Returns:
        Shape [sequences, q_heads, head_dim], float32.
    """
    sequences, q_heads, head_dim = q.shape
    kv_heads = kv_pages.shape[2] // 2
    shape = (sequences, kv_heads, q_heads // kv_heads)
    queries = q.astype(jnp.float32).reshape(*shape, head_dim)
    tasks = _DecodeTasks(kv_lens, page_indices, kv_pages.shape[1])

    def body(i: jax.Array, state: _Softmax) -> _Softmax:
        owner, page_ids, valid = tasks.take(i * sequences, sequences)
        k, v = _read_kv(kv_pages, page_ids, valid, plan)
        inside = jnp.arange(k.shape[2]) < valid[:, None]
        own_queries = queries.at[owner].get(mode="promise_in_bounds")
        scores = jnp.einsum("nhgd,nhtd->nhgt", own_queries, k)
        scores = jnp.where(inside[:, None, None, :], scores, _MASKED_SCORE)
        top = scores.max(-1)
        weights = jnp.exp(scores - top[..., None])
        acc = jnp.einsum("nhgt,nhtd->nhgd", weights, v)
        return _fold_by_owner(state, owner, _Softmax(top, weights.sum(-1), acc))

    state = lax.fori_loop(0, -(-tasks.count // sequences), body, _Softmax.start(shape, head_dim))
    return state.output().reshape(sequences, q_heads, head_dim)


def prefill_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    plan: AttentionPlan,
) -> jax.Array:
    """Causal attention of runs of new tokens, packed one sequence after the other.

    Args:
        q: Queries, shape [tokens, q_heads, head_dim]; rows behind the last sequence are padding.
        kv_pages: Pool of one layer, shape [num_pages, page_size, 2 * kv_heads, head_dim].
        kv_lens: Tokens of each sequence, its new ones included, shape [sequences], int32.
        page_indices: Pages of each sequence, shape [sequences, max_pages], int32.
        cu_q_lens: First row of each sequence and, last, the end, shape [sequences + 1], int32.
        num_seqs: How many sequences are real, shape [1], int32.
        plan: Scale and dtype.

    Returns:
        Shape [tokens, q_heads, head_dim], float32; padding rows are finite.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = kv_pages.shape[2] // 2
    rows = _divisor(tokens, _PREFILL_BLOCK_QUERIES)
    queries = q.astype(jnp.float32).reshape(tokens, kv_heads, q_heads // kv_heads, head_dim)

    def per_sequence(seq: jax.Array, out: jax.Array) -> jax.Array:
        start, end = cu_q_lens[seq], cu_q_lens[seq + 1]
        offset = kv_lens[seq] - end  # from a row to its position in the sequence

        def per_block(i: jax.Array, out: jax.Array) -> jax.Array:
            # Rows of other sequences in the block are computed too, and thrown away.
            first = i * rows
            block = _attend_rows(
                lax.dynamic_slice_in_dim(queries, first, rows),
                kv_pages,
                kv_lens[seq],
                page_indices[seq],
                first + offset,
                plan,
            )
            row = first + jnp.arange(rows)
            mine = ((row >= start) & (row < end))[:, None, None, None]
            block = jnp.where(mine, block, lax.dynamic_slice_in_dim(out, first, rows))
            return lax.dynamic_update_slice_in_dim(out, block, first, 0)

        # A sequence without rows gets no block, wherever it stands.
        blocks_end = jnp.where(end > start, -(-end // rows), 0)
        return lax.fori_loop(start // rows, blocks_end, per_block, out)

    out = lax.fori_loop(0, num_seqs[0], per_sequence, jnp.zeros_like(queries))
    return out.reshape(tokens, q_heads, head_dim)


def _attend_rows(
    q_block: jax.Array,
    kv_pages: jax.Array,
    kv_len: jax.Array,
    pages: jax.Array,
    first_position: jax.Array,
    plan: AttentionPlan,
) -> jax.Array:
    """Attends from consecutive positions of one sequence: [rows, kv_heads, group, head_dim].

    Positions may be negative or beyond the end; what comes out for them has no meaning.
    """
    rows, kv_heads, group, head_dim = q_block.shape
    q_block = q_block.transpose(1, 2, 0, 3).reshape(kv_heads, group * rows, head_dim)
    positions = jnp.tile(first_position + jnp.arange(rows), group)
    block_pages = _block_pages(_PREFILL_BLOCK_TOKENS, kv_pages.shape[1], pages.shape[0])
    block_tokens = block_pages * kv_pages.shape[1]
    pages = jnp.pad(pages, (0, -pages.shape[0] % block_pages))

    def body(j: jax.Array, state: _Softmax) -> _Softmax:
        page_ids = lax.dynamic_slice_in_dim(pages, j * block_pages, block_pages)[None]
        valid = kv_len - j * block_tokens
        k, v = (x[0] for x in _read_kv(kv_pages, page_ids, valid[None], plan))
        columns = jnp.arange(block_tokens)
        allowed = (columns <= positions[:, None] - j * block_tokens) & (columns < valid)
        scores = jnp.einsum("hrd,htd->hrt", q_block, k)
        scores = jnp.where(allowed, scores, _MASKED_SCORE)
        top = jnp.maximum(state.top, scores.max(-1))
        keep = jnp.exp(state.top - top)
        weights = jnp.exp(scores - top[..., None])
        acc = state.acc * keep[..., None] + jnp.einsum("hrt,htd->hrd", weights, v)
        return _Softmax(top, state.total * keep + weights.sum(-1), acc)

    visible = jnp.minimum(kv_len, first_position + rows)
    start = _Softmax.start((kv_heads, group * rows), head_dim)
    state = lax.fori_loop(0, -(-visible // block_tokens), body, start)
    return state.output().reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3)


def _read_kv(
    kv_pages: jax.Array, page_ids: jax.Array, valid: jax.Array, plan: AttentionPlan
) -> tuple[jax.Array, jax.Array]:
    """Gathers runs of pages as keys and values.

    How this is written decides what decoding costs, for XLA's CPU backend vectorises a copy only
    if its innermost loop is long, or does more than copy. So a page is gathered as one long row;
    the scale of the scores is applied to the keys here, not to the queries; and the values are
    multiplied by a constant that `_Softmax.output` takes out again. Measured: the two
    reorderings take half as long with the multiplications as without.

    Args:
        kv_pages: Pool of one layer, shape [num_pages, page_size, 2 * kv_heads, head_dim].
        page_ids: Shape [runs, pages], int32, in bounds.
        valid: Tokens of each run that count, shape [runs], int32.
        plan: Scale and dtype.

    Returns:
        Keys times `plan.sm_scale`; and values times _VALUE_SCALE, zero behind the valid ones.
        Each of shape [runs, kv_heads, pages * page_size, head_dim], float32.
    """
    num_pages, page_size, combined_heads, head_dim = kv_pages.shape
    runs, pages = page_ids.shape
    block = kv_pages.reshape(num_pages, -1).at[page_ids].get(mode="promise_in_bounds")
    block = block.reshape(runs, pages * page_size, combined_heads // 2, 2, head_dim)
    if block.dtype != plan.kv_dtype:
        block = lax.bitcast_convert_type(block, plan.kv_dtype)
    block = block.astype(jnp.float32)
    keys, values = (block[:, :, :, i].transpose(0, 2, 1, 3) for i in range(2))
    inside = jnp.arange(pages * page_size) < valid[:, None]
    values = jnp.where(inside[:, None, :, None], values * _VALUE_SCALE, 0.0)
    return keys * plan.sm_scale, values


def _fold_by_owner(state: _Softmax, owner: jax.Array, block: _Softmax) -> _Softmax:
    """Adds blocks [blocks, ...] to the rows [sequences, ...] that own them, several to one."""
    owns = (owner[:, None] == jnp.arange(state.top.shape[0]))[:, :, None, None]
    top = jnp.maximum(state.top, jnp.where(owns, block.top[:, None], _MASKED_SCORE).max(0))
    keep = jnp.exp(state.top - top)
    share = jnp.where(owns, jnp.exp(block.top[:, None] - top), 0.0)
    total = state.total * keep + (share * block.total[:, None]).sum(0)
    acc = state.acc * keep[..., None] + jnp.einsum("nshg,nhgd->shgd", share, block.acc)
    return _Softmax(top, total, acc)


class _DecodeTasks:
    """The list of (sequence, block of pages) pairs of one decode step."""

    def __init__(self, kv_lens: jax.Array, page_indices: jax.Array, page_size: int) -> None:
        max_pages = page_indices.shape[1]
        self._kv_lens = kv_lens
        self._block_pages = _block_pages(_DECODE_BLOCK_TOKENS, page_size, max_pages)
        self._block_tokens = self._block_pages * page_size
        self._page_indices = jnp.pad(page_indices, ((0, 0), (0, -max_pages % self._block_pages)))
        blocks = -(-kv_lens // self._block_tokens)
        self._ends = jnp.cumsum(blocks)
        self._starts = self._ends - blocks
        self.count = self._ends[-1]

    def take(self, first: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns owner [count], pages [count, block_pages] and valid tokens [count]."""
        index = first + jnp.arange(count)
        owner = (index[:, None] >= self._ends).sum(1)
        owner = jnp.minimum(owner, self._kv_lens.shape[0] - 1)
        # A place behind the end of the list reads block 0 of the last sequence, all masked.
        block = jnp.where(index < self.count, index - self._starts[owner], 0)
        valid = jnp.where(index < self.count, self._kv_lens[owner] - block * self._block_tokens, 0)
        columns = block[:, None] * self._block_pages + jnp.arange(self._block_pages)
        page_ids = self._page_indices.at[owner[:, None], columns].get(mode="promise_in_bounds")
        return owner, page_ids, valid


def _divisor(value: int, limit: int) -> int:
    """Returns the largest divisor of a number that is not above a limit."""
    return max(size for size in range(1, min(value, limit) + 1) if value % size == 0)


def _block_pages(block_tokens: int, page_size: int, max_pages: int) -> int:
    return max(1, min(block_tokens // page_size, max_pages))
