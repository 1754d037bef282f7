# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged KV pool, and the write of a step's keys and values into it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kvferry.engine import attention_reference
from kvferry.engine.attention_plan import AttentionPlan
from kvferry.engine.kv_pool_layout import KVPoolLayout

# Tokens of one double-buffered block of keys and values in VMEM, and query rows per block.
_TPU_BLOCK_TOKENS = 512
_TPU_BLOCK_QUERIES = {"prefill": 64, "decode": 8}
_TPU_VMEM_LIMIT_BYTES = 64 * 1024 * 1024


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    plan: AttentionPlan,
) -> jax.Array:
    """Causal attention of each sequence's new tokens over all its tokens.

    The arrays and their meaning are those of JAX's TPU kernel
    (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`), which is one implementation.

    Args:
        q: Queries, shape [tokens, q_heads, head_dim], sequences packed one after the other.
        kv_pages: Pool of one layer, shape [num_pages, page_size, 2 * kv_heads, head_dim] with
            the padded sizes of the layout; the new tokens are already in it.
        kv_lens: Tokens of each sequence, new ones included, shape [sequences], int32.
        page_indices: Pages of each sequence, shape [sequences, max_pages], int32.
        cu_q_lens: Row where each sequence starts, shape [sequences + 1], int32.
        num_seqs: Number of real sequences, shape [1], int32.
        plan: Static choices.

    Returns:
        Shape [tokens, q_heads, head_dim], dtype of `q`; padding rows are unspecified.
    """
    ragged = (q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    if plan.implementation == "tpu":
        return _tpu_attention(*ragged, plan)
    if plan.family == "decode":
        out = attention_reference.decode_attention(q, kv_pages, kv_lens, page_indices, plan)
    else:
        out = attention_reference.prefill_attention(*ragged, plan)
    return out.astype(q.dtype)


def write_kv(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, layout: KVPoolLayout
) -> jax.Array:
    """Writes the keys and values of a step's tokens into the pool, in place.

    Args:
        kv_pages: Pool of one layer, [num_pages, page_size, 2 * kv_heads, head_dim] with the
            padded sizes of `layout`.
        k: Keys, shape [tokens, kv_heads, head_dim], unpadded.
        v: Values, same shape.
        slots: page * page_size + offset of each token, shape [tokens], int32; any value outside
            of the pool drops its token.
        layout: Sizes and dtype of the pool.

    Returns:
        The pool, holding the new rows.
    """
    num_pages, page_size, combined_heads, head_dim = kv_pages.shape
    rows = jnp.stack([k, v], axis=2)
    if rows.shape[0] == 1:
        # XLA turns a scatter of one row into a read, a select and an update of the same place,
        # for which its CPU backend may copy the pool. A second row, dropped, keeps the scatter.
        rows = jnp.concatenate([rows, rows])
        slots = jnp.concatenate([slots, jnp.full_like(slots, num_pages * page_size)])
    padding = (combined_heads // 2 - k.shape[1], head_dim - k.shape[2])
    if any(padding):
        rows = jnp.pad(rows, ((0, 0), (0, padding[0]), (0, 0), (0, padding[1])))
    rows = rows.reshape(-1, combined_heads, head_dim).astype(layout.dtype)
    if kv_pages.dtype != rows.dtype:
        rows = lax.bitcast_convert_type(rows, kv_pages.dtype)
    flat = kv_pages.reshape(num_pages * page_size, combined_heads, head_dim)
    flat = flat.at[slots].set(rows, mode="drop", unique_indices=True)
    return flat.reshape(kv_pages.shape)


def _tpu_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    plan: AttentionPlan,
) -> jax.Array:
    # Imported here: the module pulls in the Pallas TPU stack, which no CPU server needs.
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernel_module

    tokens, q_heads, head_dim = q.shape
    page_size, padded_heads, padded_dim = (
        kv_pages.shape[1],
        kv_pages.shape[2] // 2,
        kv_pages.shape[3],
    )
    kv_heads = plan.layout.kv_heads // plan.layout.shards
    group = q_heads // kv_heads
    padding = (padded_heads - kv_heads, padded_dim - head_dim)
    if any(padding):
        q = q.reshape(tokens, kv_heads, group, head_dim)
        q = jnp.pad(q, ((0, 0), (0, padding[0]), (0, 0), (0, padding[1])))
        q = q.reshape(tokens, padded_heads * group, padded_dim)
    block_pages = max(1, min(_TPU_BLOCK_TOKENS // page_size, page_indices.shape[1]))
    out = kernel_module.ragged_paged_attention(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs,
        sm_scale=plan.sm_scale,
        num_kv_pages_per_block=block_pages,
        num_queries_per_block=min(_TPU_BLOCK_QUERIES[plan.family], tokens),
        vmem_limit_bytes=_TPU_VMEM_LIMIT_BYTES,
    )  # fmt: skip
    if any(padding):
        out = out.reshape(tokens, padded_heads, group, padded_dim)
        out = out[:, :kv_heads, :, :head_dim].reshape(tokens, q_heads, head_dim)
    return out
