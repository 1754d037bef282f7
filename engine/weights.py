# SPDX-License-Identifier: Apache-2.0
"""From named tensors of a checkpoint to the parameter tree of the forward pass.

A checkpoint, whatever its file format, is seen as a `TensorSource`: tensors under their Hugging
Face names, in the Hugging Face layout ([out, in] matrices, rotate-half RoPE order). This module
lists the tensors that a model must have, refuses any other, and lays them out for the engine:
[in, out] matrices, with Q|K|V and gate|up fused so that each block runs four matrix products.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from absl import logging

from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.model_config import ModelConfig

Array = npt.NDArray[Any]
Params = dict[str, Any]

# Tensors that some checkpoints carry although nothing needs them: RoPE tables, which are
# computed from the configuration.
_UNUSED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$")
_BLOCK_VALUES = 1 << 20  # values converted at a time; keeps the scratch memory in the cache
_ALIGNMENT_BYTES = 64  # what XLA's CPU client asks for to take a NumPy array without a copy
_FINGERPRINT_VALUES = 64
_MAX_THREADS = 8


class TensorSource(Protocol):
    """Tensors of one checkpoint, by Hugging Face name."""

    @property
    def description(self) -> str:
        """What to call the checkpoint in errors (a path)."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor, known without reading any data."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Returns tensor[start:stop] in its stored or dequantised floating-point type."""
        ...


@dataclasses.dataclass(frozen=True)
class _Part:
    """One source tensor and the place it goes to in a parameter array."""

    source: str
    target: Array
    transpose: bool


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Lists the tensors that a checkpoint of this configuration must hold.

    Args:
        config: The model configuration.

    Returns:
        Hugging Face name to shape.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    linear = [
        *(("self_attn.q_proj", config.q_size, hidden, config.qkv_bias),),
        *(("self_attn.k_proj", config.kv_size, hidden, config.qkv_bias),),
        *(("self_attn.v_proj", config.kv_size, hidden, config.qkv_bias),),
        *(("self_attn.o_proj", hidden, config.q_size, config.o_bias),),
        *(("mlp.gate_proj", inner, hidden, config.mlp_bias),),
        *(("mlp.up_proj", inner, hidden, config.mlp_bias),),
        *(("mlp.down_proj", hidden, inner, config.mlp_bias),),
    ]
    for name, out_size, in_size, bias in linear:
        block[f"{name}.weight"] = (out_size, in_size)
        if bias:
            block[f"{name}.bias"] = (out_size,)
    if config.qk_norm:
        block["self_attn.q_norm.weight"] = (config.head_dim,)
        block["self_attn.k_norm.weight"] = (config.head_dim,)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def check_shapes(source: TensorSource, config: ModelConfig) -> None:
    """Compares the tensors that a checkpoint holds with those that the model needs.

    Args:
        source: The checkpoint.
        config: The model configuration.

    Raises:
        UnsupportedModelError: The checkpoint has a tensor that the model has no use for.
        ModelFileError: A tensor is missing or has another shape than the configuration says.
    """
    expected, found = expected_shapes(config), source.shapes()
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ModelFileError(f"{source.description}: missing {_some(missing)}")
    unused = set(filter(_UNUSED.match, found.keys() - expected.keys()))
    if config.tie_embeddings and "lm_head.weight" in found:
        unused.add("lm_head.weight")
    unknown = sorted(found.keys() - expected.keys() - unused)
    if unknown:
        raise UnsupportedModelError(
            f"{source.description}: {config.architecture} has no place for {_some(unknown)}"
        )
    if unused:
        logging.info("%s: not needed and not read: %s", source.description, _some(sorted(unused)))
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelFileError(
                f"{source.description}: tensor {name!r} has shape {tuple(found[name])}, the "
                f"configuration asks for {shape}"
            )


def build_params(source: TensorSource, config: ModelConfig, dtype: npt.DTypeLike) -> Params:
    """Reads a checkpoint into the parameter tree.

    Args:
        source: The checkpoint; `check_shapes` has accepted it.
        config: The model configuration.
        dtype: Floating-point type of every parameter.

    Returns:
        Nested dictionary of NumPy arrays of type `dtype`; E = hidden_size, D = head_dim, I =
        intermediate_size, Hq and Hkv = query and KV heads, V = vocab_size:
        `embed` [V, E], `final_norm` [E], `lm_head` [V, E] (absent when tied), and `layers`, a
        list with, for each block, `attn_norm` [E], `mlp_norm` [E], `wqkv` [E, (Hq+2Hkv)*D],
        `wo` [Hq*D, E], `w_gate_up` [E, 2*I], `w_down` [I, E] and, where the model has them,
        `bqkv`, `bo`, `b_gate_up`, `b_down`, `q_norm` [D], `k_norm` [D].
    """
    layout = _Layout(config, np.dtype(dtype))
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        # list() re-raises the first error of a worker.
        list(pool.map(lambda part: _copy(source, part), layout.parts))
    return layout.params


def fingerprint(source: TensorSource, config: ModelConfig) -> str:
    """Identifies a checkpoint, so that two servers can tell whether they run the same one.

    It covers the configuration and, of every tensor that the model uses, the name, the shape and
    the first values. The values are taken before any cast: servers that run the same file in
    different precision agree.

    Args:
        source: The checkpoint.
        config: The model configuration.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name, shape in sorted(expected_shapes(config).items()):
        rows = 1 if len(shape) > 1 else _FINGERPRINT_VALUES
        values = source.rows(name, 0, rows).reshape(-1)[:_FINGERPRINT_VALUES]
        digest.update(f"{name}{shape}".encode())
        digest.update(np.ascontiguousarray(values, np.dtype("<f4")).tobytes())
    return digest.hexdigest()


class _Layout:
    """Allocates the parameter arrays and says which source tensor fills which part of them."""

    def __init__(self, config: ModelConfig, dtype: np.dtype[Any]) -> None:
        self._config = config
        self._dtype = dtype
        self.parts: list[_Part] = []
        vocab, hidden = config.vocab_size, config.hidden_size
        self.params: Params = {
            "embed": self._plain("model.embed_tokens.weight", (vocab, hidden)),
            "final_norm": self._plain("model.norm.weight", (hidden,)),
            "layers": [self._block(f"model.layers.{i}") for i in range(config.num_layers)],
        }
        if not config.tie_embeddings:
            self.params["lm_head"] = self._plain("lm_head.weight", (vocab, hidden))

    def _block(self, prefix: str) -> Params:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.q_size, config.kv_size
        block: Params = {
            "attn_norm": self._plain(f"{prefix}.input_layernorm.weight", (hidden,)),
            "mlp_norm": self._plain(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        }
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size}
        qkv[f"{attention}.v_proj"] = kv_size
        self._linear(block, ("wqkv", "bqkv"), hidden, qkv, config.qkv_bias)
        self._linear(block, ("wo", "bo"), q_size, {f"{attention}.o_proj": hidden}, config.o_bias)
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        self._linear(block, ("w_gate_up", "b_gate_up"), hidden, gate_up, config.mlp_bias)
        down = {f"{mlp}.down_proj": hidden}
        self._linear(block, ("w_down", "b_down"), inner, down, config.mlp_bias)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                block[name] = self._plain(f"{attention}.{name}.weight", (config.head_dim,))
        return block

    def _linear(
        self,
        block: Params,
        names: tuple[str, str],
        in_size: int,
        sources: Mapping[str, int],
        has_bias: bool,
    ) -> None:
        """Adds one fused projection: sources maps a projection's name to its output size."""
        weight = _aligned_empty((in_size, sum(sources.values())), self._dtype)
        bias = _aligned_empty((sum(sources.values()),), self._dtype)
        start = 0
        for source, out_size in sources.items():
            columns = slice(start, start + out_size)
            self.parts.append(_Part(f"{source}.weight", weight[:, columns], transpose=True))
            if has_bias:
                self.parts.append(_Part(f"{source}.bias", bias[columns], transpose=False))
            start += out_size
        block[names[0]] = weight
        if has_bias:
            block[names[1]] = bias

    def _plain(self, source: str, shape: tuple[int, ...]) -> Array:
        target = _aligned_empty(shape, self._dtype)
        self.parts.append(_Part(source, target, transpose=False))
        return target


def _copy(source: TensorSource, part: _Part) -> None:
    target = part.target.T if part.transpose else part.target
    width = target.shape[1] if target.ndim > 1 else 1
    step = max(1, _BLOCK_VALUES // width)
    for start in range(0, target.shape[0], step):
        stop = min(start + step, target.shape[0])
        target[start:stop] = source.rows(part.source, start, stop)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[offset : offset + num_bytes].view(dtype).reshape(shape)


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"tensor {shown}{more}" if len(names) == 1 else f"tensors {shown}{more}"
