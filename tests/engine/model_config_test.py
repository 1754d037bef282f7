# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from kvferry.engine.errors import ModelError, UnsupportedModelError
from kvferry.engine.model_config import ModelConfig, stretched_context
from kvferry.engine.rope import RopeConfig

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (_LLAMA | changes).items() if value != "absent"}


def test_llama() -> None:
    config = ModelConfig.from_hf(_config())
    assert config.architecture == "LlamaForCausalLM"
    assert config.model_type == "llama"
    assert (config.head_dim, config.q_size, config.kv_size) == (16, 64, 32)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.max_context == 2048
    assert (config.bos_id, config.eos_ids) == (1, (2,))
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert not config.tie_embeddings


def test_llama_biases_and_ties() -> None:
    config = ModelConfig.from_hf(
        _config(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=32)
    )
    assert config.qkv_bias and config.o_bias and config.mlp_bias and config.tie_embeddings
    assert config.head_dim == 32


def test_key_value_heads_default_to_query_heads() -> None:
    assert ModelConfig.from_hf(_config(num_key_value_heads="absent")).num_kv_heads == 4


def test_qwen2_has_qkv_biases_only() -> None:
    config = ModelConfig.from_hf(_config(architectures=["Qwen2ForCausalLM"]))
    assert config.qkv_bias
    assert not config.o_bias and not config.mlp_bias and not config.qk_norm


def test_qwen3_has_qk_norm_and_its_own_default_head_size() -> None:
    config = ModelConfig.from_hf(_config(architectures=["Qwen3ForCausalLM"]))
    assert config.qk_norm and not config.qkv_bias
    assert config.head_dim == 128


def test_architecture_from_model_type_when_the_list_is_absent() -> None:
    config = ModelConfig.from_hf(_config(architectures="absent", model_type="qwen3"))
    assert config.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture 'GemmaForCausalLM' is not supp"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": "absent", "model_type": "rwkv"}, "model_type 'rwkv'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_unsupported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(_config(**changes))


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 2048}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, False),
        # transformers takes an absent key for a window of 4096.
        ({"architectures": ["MistralForCausalLM"]}, True),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, False),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, True),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                **{"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64},
            },
            False,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                **{"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64},
            },
            True,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                **{"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
            },
            False,
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2},
            True,
        ),
    ],
)
def test_sliding_window(changes: dict[str, Any], supported: bool) -> None:
    if supported:
        ModelConfig.from_hf(_config(**changes))
        return
    with pytest.raises(UnsupportedModelError, match="sliding-window attention .sliding_window"):
        ModelConfig.from_hf(_config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "config.json lacks 'hidden_size'"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer, got -1"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer, got '2'"),
        ({"num_key_value_heads": 3}, "num_q_heads 4 is not a multiple of num_kv_heads 3"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number, got 'x'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be in"),
        ({"eos_token_id": [1, -2]}, "eos_token_id must be a token id or a list of them"),
        ({"rope_theta": 0.5}, "rope theta must be a finite number above 1, got 0.5"),
        ({"rope_scaling": "x"}, "rope_scaling in config.json must be an object, got 'x'"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling factor must be a number, got None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "must be at least 1, got 0.5"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(_config(**changes))


def test_several_eos_ids_keep_their_order() -> None:
    assert ModelConfig.from_hf(_config(eos_token_id=[9, 2, 9])).eos_ids == (9, 2)
    assert ModelConfig.from_hf(_config(eos_token_id=None)).eos_ids == ()


def test_yarn_stretches_the_context() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert ModelConfig.from_hf(_config(rope_scaling=rope)).max_context == 8192
    stretched = RopeConfig.from_hf(_config(rope_scaling=rope, max_position_embeddings=16384))
    assert stretched_context(stretched, 16384) == 16384


def test_wrong_number_of_frequency_divisors() -> None:
    config = ModelConfig.from_hf(_config())
    with pytest.raises(ModelError, match="3 frequency divisors, head_dim 16 needs 8"):
        ModelConfig(
            **{
                **{name: getattr(config, name) for name in config.__dataclass_fields__},
                "rope": RopeConfig(theta=10000.0, freq_divisors=(1.0, 1.0, 1.0)),
            }
        )
