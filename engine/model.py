# SPDX-License-Identifier: Apache-2.0
"""One forward step of a Llama-family model over a ragged batch.

A step takes some new tokens of some sequences, packed into one row dimension, writes their keys
and values into the paged pool, and attends over what the pool then holds. Prefill, a chunk of a
prefill, and decode are the same step.

Layers are unrolled: a scan would slice the stacked weights, which XLA's CPU backend does by
copying them.

With tensor parallelism the function runs once per shard under `shard_map`: it sees its own heads
and its own slice of the MLP and of the vocabulary, and sums partial results (column-parallel,
then row-parallel products: Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvferry.engine.attention import ragged_paged_attention, write_kv
from kvferry.engine.attention_plan import AttentionPlan
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.rope import inverse_frequencies

Params = dict[str, Any]


class StepInputs(NamedTuple):
    """What a step needs besides weights and pool; all int32, padded to the compiled shape.

    Attributes:
        token_ids: New tokens, sequences packed one after the other, [tokens].
        positions: Position of each in its sequence, [tokens].
        slots: page * page_size + offset of each, [tokens]; beyond the pool for padding rows.
        kv_lens: Tokens of each sequence, new ones included, [sequences]; 0 for padding.
        page_tables: Pages of each sequence, [sequences, max_pages].
        cu_q_lens: Row where each sequence starts, [sequences + 1].
        num_seqs: Number of real sequences, [1].
    """

    token_ids: jax.Array
    positions: jax.Array
    slots: jax.Array
    kv_lens: jax.Array
    page_tables: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """The static choices of one compiled step.

    Attributes:
        attention: Those of its attention.
        axis_name: Mesh axis of the tensor parallelism, or None on one device.
    """

    attention: AttentionPlan
    axis_name: str | None = None


def forward(
    params: Params,
    config: ModelConfig,
    kv_pages: list[jax.Array],
    inputs: StepInputs,
    *,
    plan: ForwardPlan,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Runs one step.

    Args:
        params: Parameter tree as the loader makes it (this shard's slice of it).
        config: The model.
        kv_pages: Pool, one array per layer (this shard's slice); to be donated.
        inputs: The step's rows and tables.
        plan: Static choices.

    Returns:
        Normalised final hidden states [tokens, hidden_size] in the dtype of the parameters;
        logits of each sequence's last new token [sequences, vocab_size], float32; the pool.
        Rows and sequences that are padding are unspecified.
    """
    rotation = _rotation(config, inputs.positions)
    x = _embed(params["embed"], inputs.token_ids, plan)
    # Under a jit of its own a layer is traced once for all layers; XLA inlines the calls.
    block = jax.jit(functools.partial(_block, config=config, plan=plan))
    new_pages = []
    for layer, pages in zip(params["layers"], kv_pages, strict=True):
        x, pages = block(layer, x, pages, inputs, rotation)
        new_pages.append(pages)
    hidden = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    last = hidden.at[inputs.cu_q_lens[1:] - 1].get(mode="clip")
    return hidden, project_logits(params, config, last, plan.axis_name), new_pages


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scales rows to unit root mean square, in float32.

    Args:
        x: Shape [..., size].
        weight: Shape [size].
        eps: Added to the mean square.

    Returns:
        Same shape and dtype as `x`.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return ((wide * scale).astype(x.dtype) * weight).astype(x.dtype)


def project_logits(
    params: Params, config: ModelConfig, hidden: jax.Array, axis_name: str | None
) -> jax.Array:
    """Projects normalised hidden states onto the vocabulary.

    Args:
        params: Parameter tree.
        config: The model.
        hidden: Shape [rows, hidden_size].
        axis_name: Mesh axis over which the vocabulary is split, or None.

    Returns:
        Shape [rows, vocab_size], float32.
    """
    head = params["embed"] if config.tie_embeddings else params["lm_head"]
    logits = lax.dot_general(
        hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if axis_name is not None:
        logits = lax.all_gather(logits, axis_name, axis=1, tiled=True)
    return logits[:, : config.vocab_size]


def _embed(table: jax.Array, token_ids: jax.Array, plan: ForwardPlan) -> jax.Array:
    if plan.axis_name is None:
        return table.at[token_ids].get(mode="clip")
    local = token_ids - lax.axis_index(plan.axis_name) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table.at[local].get(mode="clip")
    return lax.psum(jnp.where(mine[:, None], rows, 0), plan.axis_name)


def _block(
    layer: Params,
    x: jax.Array,
    pages: jax.Array,
    inputs: StepInputs,
    rotation: tuple[jax.Array, jax.Array],
    *,
    config: ModelConfig,
    plan: ForwardPlan,
) -> tuple[jax.Array, jax.Array]:
    normed = rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
    attended, pages = _attention(layer, config, normed, pages, inputs, rotation, plan)
    x = x + attended
    x = x + _mlp(layer, rms_norm(x, layer["mlp_norm"], config.rms_norm_eps), plan)
    return x, pages


def _attention(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    pages: jax.Array,
    inputs: StepInputs,
    rotation: tuple[jax.Array, jax.Array],
    plan: ForwardPlan,
) -> tuple[jax.Array, jax.Array]:
    tokens, dim = x.shape[0], config.head_dim
    q_heads = config.num_q_heads // plan.attention.layout.shards
    kv_heads = config.num_kv_heads // plan.attention.layout.shards
    qkv = _linear(x, layer["wqkv"], layer.get("bqkv")).reshape(tokens, -1, dim)
    q, k, v = jnp.split(qkv, [q_heads, q_heads + kv_heads], axis=1)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    q, k = _rotate(q, rotation), _rotate(k, rotation)
    pages = write_kv(pages, k, v, inputs.slots, plan.attention.layout)
    out = ragged_paged_attention(
        q,
        pages,
        inputs.kv_lens,
        inputs.page_tables,
        inputs.cu_q_lens,
        inputs.num_seqs,
        plan.attention,
    )
    out = out.reshape(tokens, q_heads * dim)
    return _row_parallel(out, layer["wo"], layer.get("bo"), plan.axis_name), pages


def _mlp(layer: Params, x: jax.Array, plan: ForwardPlan) -> jax.Array:
    gate, up = jnp.split(_linear(x, layer["w_gate_up"], layer.get("b_gate_up")), 2, axis=1)
    return _row_parallel(
        jax.nn.silu(gate) * up, layer["w_down"], layer.get("b_down"), plan.axis_name
    )


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = x @ weight
    return y if bias is None else y + bias


def _row_parallel(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, axis_name: str | None
) -> jax.Array:
    y = x @ weight
    if axis_name is not None:
        y = lax.psum(y, axis_name)
    return y if bias is None else y + bias


def _rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cos [tokens, 1, 1, head_dim / 2] and signed sin [tokens, 1, 2, head_dim / 2]."""
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
    angles = positions.astype(jnp.float32)[:, None, None, None] * frequencies
    sin = jnp.sin(angles) * factor
    return jnp.cos(angles) * factor, jnp.concatenate([-sin, sin], axis=2)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates pairs (i, i + head_dim / 2) of [tokens, heads, head_dim], in float32."""
    cos, signed_sin = rotation
    halves = x.astype(jnp.float32).reshape(*x.shape[:2], 2, -1)
    # Swapping the halves by a reversal keeps this one loop that XLA's CPU backend vectorises.
    rotated = halves * cos + halves[:, :, ::-1] * signed_sin
    return rotated.reshape(x.shape).astype(x.dtype)
