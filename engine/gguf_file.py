# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a checkpoint: its configuration and its dequantised tensors.

Names and layouts are those that llama.cpp's converter writes. Two of its changes are undone
here, so that the rest of the engine sees one convention: architecture `llama` stores the rows of
Q and K interleaved for adjacent-pair RoPE, and the llama3 RoPE scaling arrives as a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvferry.engine.config_fields import is_int
from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.gguf_header import GgufHeader, GgufTensor, read_header
from kvferry.engine.model_config import SUPPORTED_ARCHITECTURES, ModelConfig, stretched_context
from kvferry.engine.rope import RopeConfig
from kvferry.engine.weights import Array

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_INTERLEAVED_ARCHITECTURES = ("llama",)
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
_ROPE_FREQS = "rope_freqs.weight"
_READABLE = frozenset(
    gguf.GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    )
)
_MISSING = object()


class GgufFile:
    """One GGUF file, opened; a `TensorSource` under Hugging Face names."""

    def __init__(self, path: Path) -> None:
        """Opens the file and reads its header.

        Args:
            path: The .gguf file.

        Raises:
            ModelFileError: The file is truncated or malformed, or a key is missing.
            UnsupportedModelError: The architecture, an option, a tensor or a storage type is not
                supported; the message names it.
        """
        self._header: GgufHeader = read_header(path)
        self._architecture: str = self.metadata.get("general.architecture", "(none)")
        self._tensors = self._named_tensors()
        self.config = self._read_config()

    @property
    def description(self) -> str:
        """The path, for errors."""
        return str(self._header.path)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the file: numbers, booleans, strings, lists of strings, arrays."""
        return self._header.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor by Hugging Face name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Dequantises some rows of a tensor.

        Args:
            name: Hugging Face name.
            start: First row.
            stop: One past the last row; clipped to the number of rows.

        Returns:
            tensor[start:stop], float32.
        """
        tensor = self._tensors[name]
        stored = self._stored(tensor)
        heads = self._interleaved_heads(name)
        if heads:
            chosen = stored[_rotate_half_order(tensor.shape[0], heads)[start:stop]]
        else:
            chosen = stored[start:stop]
        return _dequantize(chosen, tensor.kind).reshape(-1, *tensor.shape[1:])

    def _stored(self, tensor: GgufTensor) -> Array:
        """Returns the bytes of a tensor, shape [rows, bytes per row]."""
        raw = self._header.data[tensor.offset : tensor.offset + tensor.num_bytes]
        return np.asarray(raw).reshape(tensor.shape[0], -1)

    def _interleaved_heads(self, name: str) -> int:
        if self._architecture not in _INTERLEAVED_ARCHITECTURES:
            return 0
        if ".q_proj." in name:
            return self.config.num_q_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0

    def _named_tensors(self) -> dict[str, GgufTensor]:
        path = self._header.path
        if self._architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: architecture {self._architecture!r} is not supported; supported: "
                f"{', '.join(sorted(_ARCHITECTURES))}"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{path}: one of {self.metadata['split.count']} parts of a split GGUF file; "
                "merge them with llama-gguf-split --merge"
            )
        named = {}
        for tensor in self._header.tensors.values():
            if tensor.kind not in _READABLE:
                raise UnsupportedModelError(
                    f"{path}: tensor {tensor.name!r} has storage type {tensor.kind.name}, which is "
                    f"not supported; supported: {', '.join(sorted(k.name for k in _READABLE))}"
                )
            if tensor.name != _ROPE_FREQS:
                named[_hf_name(tensor.name)] = tensor
        return named

    def _read_config(self) -> ModelConfig:
        architecture = _ARCHITECTURES[self._architecture]
        if "model.embed_tokens.weight" not in self._tensors:
            raise ModelFileError(f"{self.description}: missing tensor 'token_embd.weight'")
        if self._key("expert_count", 0):
            raise UnsupportedModelError(
                f"{self.description}: {self._architecture} with {self._key('expert_count')} "
                "experts is not supported; only dense models are"
            )
        context = self._size("context_length")
        window = self._key("attention.sliding_window", 0)
        if window and window < context:
            raise UnsupportedModelError(
                f"{self.description}: sliding-window attention (window {window}) is not supported"
            )
        head_dim = self._head_dim()
        rope = self._rope(head_dim, context)
        num_q_heads = self._size("attention.head_count")
        return ModelConfig(
            architecture=architecture,
            model_type=SUPPORTED_ARCHITECTURES[architecture],
            vocab_size=self._tensors["model.embed_tokens.weight"].shape[0],
            hidden_size=self._size("embedding_length"),
            intermediate_size=self._size("feed_forward_length"),
            num_layers=self._size("block_count"),
            num_q_heads=num_q_heads,
            num_kv_heads=self._size("attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            rms_norm_eps=float(self._key("attention.layer_norm_rms_epsilon")),
            rope=rope,
            max_context=stretched_context(rope, context),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            o_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.up_proj.bias" in self._tensors,
            qk_norm=self._architecture == "qwen3",
            tie_embeddings="lm_head.weight" not in self._tensors,
            bos_id=self._token_id("bos"),
            eos_ids=self._eos_ids(),
        )

    def _head_dim(self) -> int:
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            other = self._size(key, head_dim)
            if other != head_dim:
                raise UnsupportedModelError(
                    f"{self.description}: {self._architecture}.{key} {other} differs from the "
                    f"head size {head_dim}, which is not supported"
                )
        return head_dim

    def _rope(self, head_dim: int, context: int) -> RopeConfig:
        theta = float(self._key("rope.freq_base", 10000.0))
        divisors = self._rope_divisors(head_dim)
        # As in llama.cpp, a factor without a type is a linear one, and 0 means none.
        kind = self._key("rope.scaling.type", "linear")
        factor = float(self._key("rope.scaling.factor", self._key("rope.scale_linear", 0.0)))
        if kind == "none" or factor in (0.0, 1.0):
            return RopeConfig(theta=theta, freq_divisors=divisors)
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(
                f"{self.description}: rope scaling type {kind!r} is not supported"
            )
        attention_factor = None
        extra = self._key("rope.scaling.attn_factor", None)
        if kind == "yarn" and extra is not None:
            # llama.cpp multiplies its own correction by this key.
            attention_factor = float(extra) * (0.1 * math.log(factor) + 1.0)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_context=self._size("rope.scaling.original_context_length", context),
            beta_fast=float(self._key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._key("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=attention_factor,
            freq_divisors=divisors,
        )

    def _rope_divisors(self, head_dim: int) -> tuple[float, ...]:
        tensor = self._header.tensors.get(_ROPE_FREQS)
        if tensor is None:
            return ()
        divisors = _dequantize(self._stored(tensor), tensor.kind).reshape(-1)
        if divisors.size != head_dim // 2 or not np.all(divisors > 0):
            raise ModelFileError(
                f"{self.description}: {_ROPE_FREQS!r} must hold {head_dim // 2} positive "
                f"values, got {divisors.size}"
            )
        return tuple(divisors.tolist())

    def _eos_ids(self) -> tuple[int, ...]:
        ids = [self._token_id(name) for name in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def _token_id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return int(value) if is_int(value) and value != 0xFFFFFFFF else None

    def _key(self, key: str, default: Any = _MISSING) -> Any:
        """Reads `<architecture>.<key>`; a per-layer list must hold one value only."""
        value = self.metadata.get(f"{self._architecture}.{key}", default)
        if value is _MISSING:
            raise ModelFileError(f"{self.description}: metadata lacks '{self._architecture}.{key}'")
        if isinstance(value, np.ndarray):
            values = set(value.tolist())
            if len(values) != 1:
                raise UnsupportedModelError(
                    f"{self.description}: {self._architecture}.{key} differs between layers, "
                    "which is not supported"
                )
            return values.pop()
        return value

    def _size(self, key: str, default: Any = _MISSING) -> int:
        value = self._key(key, default)
        if not is_int(value) or value <= 0:
            raise ModelFileError(
                f"{self.description}: {self._architecture}.{key} must be a positive integer, got "
                f"{value!r}"
            )
        return value


def _hf_name(name: str) -> str:
    """Translates a GGUF tensor name; an unknown one is kept, to be refused under its own name."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _BLOCK_NAME.match(name)
    if match is None or match[2] not in _BLOCK:
        return name
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def _rotate_half_order(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Returns the stored row of each row: (pair, half) within a head becomes (half, pair)."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _dequantize(stored: Array, kind: gguf.GGMLQuantizationType) -> Array:
    """Returns the float32 values, shape [rows, values per row], of rows of bytes."""
    values: Array = gguf.dequantize(np.ascontiguousarray(stored), kind)
    return values
