# SPDX-License-Identifier: Apache-2.0
"""The shape of a Llama-family model, read from a Hugging Face `config.json`.

One dataclass describes every supported architecture: they differ only in the sizes, in which
projections carry a bias, in whether Q and K heads are normalised, and in how RoPE is scaled.
Whatever would need other arithmetic (sliding-window attention, experts, another activation,
pre-quantised weights) is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvferry.engine.config_fields import number, size, token_ids
from kvferry.engine.errors import ModelError, UnsupportedModelError
from kvferry.engine.rope import RopeConfig

# What an absent key of config.json means differs per architecture; the values are those of the
# configuration classes of transformers.
_DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128}
_DEFAULT_SLIDING_WINDOW = 4096

SUPPORTED_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model.

    Attributes:
        architecture: Hugging Face class name, for example `LlamaForCausalLM`.
        model_type: Hugging Face short name, for example `llama`.
        vocab_size: Rows of the embedding table.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_layers: Transformer blocks.
        num_q_heads: Query heads.
        num_kv_heads: Key/value heads; divides `num_q_heads`.
        head_dim: Size of one head; even. Need not be hidden_size / num_q_heads.
        rms_norm_eps: Epsilon of every RMS norm.
        rope: Rotary position embedding.
        max_context: Longest sequence, prompt and output together, in tokens.
        qkv_bias: Q, K and V projections carry a bias.
        o_bias: The attention output projection carries a bias.
        mlp_bias: Gate, up and down projections carry a bias.
        qk_norm: Q and K heads are RMS-normalised before RoPE (Qwen3).
        tie_embeddings: The output projection is the embedding table.
        bos_id: Token that starts a sequence, or None.
        eos_ids: Tokens that end an answer.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks that the sizes fit together.

        Raises:
            UnsupportedModelError: The architecture is not one of SUPPORTED_ARCHITECTURES.
            ModelError: A size is not positive or does not fit another one.
        """
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise _unsupported_architecture(self.architecture)
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads"),
            *("num_kv_heads", "head_dim", "max_context"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ModelError(f"{name} must be a positive integer, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"num_q_heads {self.num_q_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if not 0 < self.rms_norm_eps < 1:
            raise ModelError(f"rms_norm_eps must be in (0, 1), got {self.rms_norm_eps!r}")
        divisors = len(self.rope.freq_divisors)
        if divisors not in (0, self.head_dim // 2):
            raise ModelError(
                f"rope carries {divisors} frequency divisors, head_dim {self.head_dim} needs "
                f"{self.head_dim // 2}"
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (the value heads have the same)."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed config.json.

        Args:
            config: The object in config.json.

        Returns:
            The model configuration.

        Raises:
            UnsupportedModelError: The architecture or one of its options is not implemented;
                the message names it.
            ModelError: A key is missing or its value makes no sense.
        """
        architecture = _architecture(config)
        _refuse_unsupported(config, architecture)
        num_q_heads = size(config, "num_attention_heads")
        hidden_size = size(config, "hidden_size")
        head_dim = config.get("head_dim") or _DEFAULT_HEAD_DIM.get(architecture)
        if head_dim is None:
            if hidden_size % num_q_heads:
                raise ModelError(
                    f"hidden_size {hidden_size} is not a multiple of num_attention_heads "
                    f"{num_q_heads} and config.json gives no head_dim"
                )
            head_dim = hidden_size // num_q_heads
        attention_bias = bool(config.get("attention_bias", False))
        has_attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        rope = RopeConfig.from_hf(config)
        return cls(
            architecture=architecture,
            model_type=SUPPORTED_ARCHITECTURES[architecture],
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size(config, "intermediate_size"),
            num_layers=size(config, "num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_q_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope=rope,
            max_context=stretched_context(rope, size(config, "max_position_embeddings")),
            qkv_bias=architecture == "Qwen2ForCausalLM" or (has_attention_bias and attention_bias),
            o_bias=has_attention_bias and attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_id=_first(token_ids(config.get("bos_token_id"), "bos_token_id")),
            eos_ids=token_ids(config.get("eos_token_id"), "eos_token_id"),
        )


def stretched_context(rope: RopeConfig, max_positions: int) -> int:
    """Returns the longest context in tokens, counting what a yarn scaling adds.

    Model cards tell users to add a yarn entry to config.json and leave
    max_position_embeddings at the length before the stretch.

    Args:
        rope: The RoPE configuration.
        max_positions: The context length that the model file states, in tokens.

    Returns:
        The context length in tokens.
    """
    if rope.kind != "yarn":
        return max_positions
    return max(max_positions, int(rope.original_max_context * rope.factor))


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list | tuple) and names:
        architecture = str(names[0])
    else:
        model_type = config.get("model_type")
        by_type = {kind: name for name, kind in SUPPORTED_ARCHITECTURES.items()}
        architecture = by_type.get(str(model_type), f"model_type {model_type!r}")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise _unsupported_architecture(architecture)
    return architecture


def _unsupported_architecture(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"architecture {name!r} is not supported; supported: "
        f"{', '.join(sorted(SUPPORTED_ARCHITECTURES))}"
    )


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UnsupportedModelError(
            f"{architecture} with quantization_config (quant_method {method!r}) is not "
            "supported; use the unquantised checkpoint or a GGUF file"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{architecture} with hidden_act {activation!r} is not supported; only silu is"
        )
    window = _sliding_window(config, architecture)
    # A window that covers the whole context masks nothing.
    if window is not None and window < size(config, "max_position_embeddings"):
        raise UnsupportedModelError(
            f"{architecture} with sliding-window attention (sliding_window {window}) is not "
            "supported; only full attention is"
        )


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    window = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW)
    if window is None or architecture == "LlamaForCausalLM":
        return None
    layer_types = config.get("layer_types")
    if architecture == "MistralForCausalLM":
        windowed = True
    elif layer_types is not None:
        windowed = any(kind != "full_attention" for kind in layer_types)
    else:
        windowed = bool(config.get("use_sliding_window", False)) and (
            config.get("max_window_layers", 28) < size(config, "num_hidden_layers")
        )
    return int(window) if windowed else None


def _first(values: tuple[int, ...]) -> int | None:
    return values[0] if values else None
