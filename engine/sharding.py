# SPDX-License-Identifier: Apache-2.0
"""How the parameters are split over the devices of a tensor-parallel mesh.

Every device gets whole heads and a slice of the MLP and of the vocabulary: the fused Q|K|V and
gate|up matrices are cut so that each device's slice is itself fused, [q_i | k_i | v_i] and
[gate_i | up_i], and the forward pass is the same code on every device. The embedding table is
padded with zero rows to a multiple of the number of devices.
"""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvferry.engine.model_config import ModelConfig
from kvferry.engine.weights import Array, Params

TP_AXIS = "tp"  # mesh axis over which heads, the MLP and the vocabulary are split

_COLUMNS = PartitionSpec(None, TP_AXIS)
_ROWS = PartitionSpec(TP_AXIS, None)
_VECTOR = PartitionSpec(TP_AXIS)
_REPLICATED = PartitionSpec()
_LAYER_SPECS = {
    **{"attn_norm": _REPLICATED, "mlp_norm": _REPLICATED},
    **{"q_norm": _REPLICATED, "k_norm": _REPLICATED},
    **{"wqkv": _COLUMNS, "bqkv": _VECTOR, "wo": _ROWS, "bo": _REPLICATED},
    **{"w_gate_up": _COLUMNS, "b_gate_up": _VECTOR, "w_down": _ROWS, "b_down": _REPLICATED},
}
_TOP_SPECS = {"embed": _ROWS, "lm_head": _ROWS, "final_norm": _REPLICATED}


def param_shapes(config: ModelConfig, dtype: npt.DTypeLike, shards: int = 1) -> Params:
    """Describes the parameter tree without any weights, for ahead-of-time compilation.

    Args:
        config: The model.
        dtype: Type of every parameter.
        shards: Number of devices that the parameters are split over.

    Returns:
        The tree of `weights.build_params`, of jax.ShapeDtypeStruct; global shapes.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv_size = config.q_size + 2 * config.kv_size
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "mlp_norm": (hidden,),
        "wqkv": (hidden, qkv_size),
        "wo": (config.q_size, hidden),
        "w_gate_up": (hidden, 2 * inner),
        "w_down": (inner, hidden),
    }
    if config.qkv_bias:
        layer["bqkv"] = (qkv_size,)
    if config.o_bias:
        layer["bo"] = (hidden,)
    if config.mlp_bias:
        layer |= {"b_gate_up": (2 * inner,), "b_down": (hidden,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    vocab = -(-config.vocab_size // shards) * shards
    top: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "final_norm": (hidden,)}
    if not config.tie_embeddings:
        top["lm_head"] = (vocab, hidden)

    def describe(shapes: dict[str, tuple[int, ...]]) -> Params:
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}

    return describe(top) | {"layers": [describe(layer) for _ in range(config.num_layers)]}


def param_specs(config: ModelConfig) -> Params:
    """Says how each parameter is split.

    Args:
        config: The model.

    Returns:
        The tree of `weights.build_params`, of jax.sharding.PartitionSpec over TP_AXIS.
    """
    shapes = param_shapes(config, np.float32)
    specs: Params = {name: _TOP_SPECS[name] for name in shapes if name != "layers"}
    specs["layers"] = [{name: _LAYER_SPECS[name] for name in layer} for layer in shapes["layers"]]
    return specs


def shard_params(params: Params, config: ModelConfig, mesh: Mesh) -> Params:
    """Places the parameters on a mesh.

    Args:
        params: The tree of `weights.build_params`, in host memory.
        config: The model.
        mesh: Devices with an axis TP_AXIS; over its other axes parameters are replicated.

    Returns:
        The same tree of jax.Array. Fused matrices are in per-device order.

    Raises:
        ValueError: The heads or the MLP cannot be split over that many devices.
    """
    shards = mesh.shape[TP_AXIS]
    for name in ("num_q_heads", "num_kv_heads", "intermediate_size"):
        value = getattr(config, name)
        if value % shards:
            raise ValueError(
                f"cannot split {name} {value} over {shards} devices; choose a tensor-parallel "
                "size that divides it"
            )
    qkv = (config.q_size, config.kv_size, config.kv_size)
    gate_up = (config.intermediate_size, config.intermediate_size)
    fused = {"wqkv": qkv, "bqkv": qkv, "w_gate_up": gate_up, "b_gate_up": gate_up}
    vocab = -(-config.vocab_size // shards) * shards

    def place(name: str, value: Array, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        if name in fused:
            return _place_fused(value, fused[name], sharding)
        if name in ("embed", "lm_head") and value.shape[0] < vocab:
            value = np.pad(value, ((0, vocab - value.shape[0]), (0, 0)))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    specs = param_specs(config)
    placed: Params = {
        name: place(name, params[name], spec) for name, spec in specs.items() if name != "layers"
    }
    placed["layers"] = [
        {name: place(name, layer[name], spec) for name, spec in layer_specs.items()}
        for layer, layer_specs in zip(params["layers"], specs["layers"], strict=True)
    ]
    return placed


def _place_fused(value: Array, sizes: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Places columns [a | b | ...] so that shard i holds [a_i | b_i | ...]."""
    shards = sharding.mesh.shape[TP_AXIS]
    parts = np.split(value, np.cumsum(sizes)[:-1], axis=-1)

    def shard(index: tuple[slice, ...] | None) -> Array:
        start = index[-1].start or 0 if index else 0
        i = start // (value.shape[-1] // shards)
        widths = [size // shards for size in sizes]
        return np.concatenate(
            [part[..., i * w : (i + 1) * w] for part, w in zip(parts, widths, strict=True)],
            axis=-1,
        )

    return jax.make_array_from_callback(value.shape, sharding, shard)
