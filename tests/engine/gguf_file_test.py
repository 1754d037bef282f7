# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvferry.engine import weights
from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.gguf_file import GgufFile
from kvferry.engine.hf_folder import HfFolder
from kvferry.engine.rope import RopeConfig, inverse_frequencies
from kvferry.tests.engine.checkpoints import (
    Array,
    byte_vocabulary,
    gguf_tensors,
    llama_metadata,
    smollm2_path,
    tiny_folder,
    write_gguf,
)

_Q = gguf.GGMLQuantizationType
# Bytes of one block and where its float16 scales lie.
_RANDOM_BLOCKS = {
    _Q.Q4_K: (144, (0, 2)),
    _Q.Q6_K: (210, (208,)),
    _Q.Q2_K: (84, (80, 82)),
    _Q.Q3_K: (110, (108,)),
    _Q.Q5_K: (176, (0, 2)),
}


def _metadata(**changes: Any) -> dict[str, Any]:
    base = {
        ".block_count": 1,
        ".context_length": 128,
        ".embedding_length": 256,
        ".feed_forward_length": 256,
        ".attention.head_count": 4,
        ".attention.head_count_kv": 2,
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".rope.freq_base": 10000.0,
    }
    merged = base | {f".{key}": value for key, value in changes.items()}
    return {key: value for key, value in merged.items() if value is not None}


def _tensors(matrices: _Q | None = None) -> dict[str, Array | tuple[Array, _Q]]:
    """One Llama layer of hidden size 256, its matrices in the given storage type."""
    rng = np.random.default_rng(0)
    shapes = {
        **{"token_embd": (300, 256), "output": (300, 256)},
        **{"blk.0.attn_q": (256, 256), "blk.0.attn_k": (128, 256), "blk.0.attn_v": (128, 256)},
        **{"blk.0.attn_output": (256, 256), "blk.0.ffn_gate": (256, 256)},
        **{"blk.0.ffn_up": (256, 256), "blk.0.ffn_down": (256, 256)},
    }
    tensors: dict[str, Array | tuple[Array, _Q]] = {}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors[f"{name}.weight"] = rng.normal(size=256).astype(np.float32)
    for name, shape in shapes.items():
        values: Array = rng.normal(size=shape).astype(np.float32)
        if matrices in _RANDOM_BLOCKS:
            size, scales = _RANDOM_BLOCKS[matrices]
            values = _blocks(rng, shape[0], size, scales)
        tensors[f"{name}.weight"] = values if matrices is None else (values, matrices)
    return tensors


def _blocks(rng: np.random.Generator, rows: int, size: int, scales: tuple[int, ...]) -> Array:
    """Random blocks, one per row, whose float16 scales are small finite numbers."""
    raw: Array = rng.integers(0, 256, (rows, size), dtype=np.uint8)
    for offset in scales:
        scale = rng.uniform(-0.1, 0.1, rows).astype(np.float16)
        raw[:, offset : offset + 2] = scale.view(np.uint8).reshape(rows, 2)
    return raw


@pytest.mark.parametrize(
    "kind",
    [
        *(_Q.F32, _Q.F16, _Q.BF16, _Q.Q8_0, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1),
        *(_Q.Q2_K, _Q.Q3_K, _Q.Q4_K, _Q.Q5_K, _Q.Q6_K),
    ],
    ids=lambda kind: kind.name,
)
def test_storage_types(tmp_path: Path, kind: _Q) -> None:
    # qwen2 stores Q and K in the order in which the engine wants them.
    path = write_gguf(tmp_path / "m.gguf", "qwen2", _metadata(), _tensors(kind))
    source = GgufFile(path)
    reference = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for gguf_name, name in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
    ):
        tensor = reference[gguf_name]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        rows = expected.shape[0]
        np.testing.assert_array_equal(source.rows(name, 0, rows), expected)
        np.testing.assert_array_equal(source.rows(name, 3, 50), expected[3:50])
        assert np.all(np.isfinite(expected))
        assert len(np.unique(expected)) > 10


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_llama_file_equals_the_folder_that_it_came_from(tmp_path: Path, name: str) -> None:
    """Undoes the interleaving of Q and K rows; every value arrives in its place."""
    folder = HfFolder(tiny_folder(name))
    metadata = llama_metadata(tiny_folder(name))
    metadata[".attention.key_length"] = folder.config.head_dim
    metadata[".attention.value_length"] = folder.config.head_dim
    tensors = gguf_tensors(tiny_folder(name), permute=True)
    source = GgufFile(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors))
    for tensor, shape in folder.shapes().items():
        np.testing.assert_array_equal(
            source.rows(tensor, 0, shape[0]),
            folder.rows(tensor, 0, shape[0]).astype(np.float32),
            err_msg=tensor,
        )
    config = folder.config
    for field in ("head_dim", "num_q_heads", "num_kv_heads", "hidden_size", "num_layers"):
        assert getattr(source.config, field) == getattr(config, field)
    assert source.config.bos_id == 256
    assert source.config.eos_ids == (257,)


def test_interleaved_biases_are_undone_too(tmp_path: Path) -> None:
    folder = tiny_folder("llama_bias")
    tensors = gguf_tensors(folder, permute=True)
    metadata = llama_metadata(folder) | {
        ".rope.scaling.type": "linear",
        ".rope.scaling.factor": 2.0,
    }
    source = GgufFile(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors))
    assert source.config.qkv_bias and source.config.o_bias and source.config.mlp_bias
    assert source.config.tie_embeddings
    assert (source.config.rope.kind, source.config.rope.factor) == ("linear", 2.0)
    weights.check_shapes(source, source.config)
    name = "model.layers.1.self_attn.q_proj.bias"
    np.testing.assert_array_equal(
        source.rows(name, 0, 48), HfFolder(folder).rows(name, 0, 48).astype(np.float32)
    )


@pytest.mark.parametrize(("name", "architecture"), [("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_qwen(tmp_path: Path, name: str, architecture: str) -> None:
    folder = HfFolder(tiny_folder(name))
    metadata = llama_metadata(tiny_folder(name))
    del metadata[".rope.dimension_count"]
    metadata[".attention.key_length"] = folder.config.head_dim
    metadata[".attention.value_length"] = folder.config.head_dim
    tensors = gguf_tensors(tiny_folder(name), permute=False)
    source = GgufFile(write_gguf(tmp_path / "m.gguf", architecture, metadata, tensors))
    assert source.config.architecture == folder.config.architecture
    assert source.config.qk_norm == folder.config.qk_norm
    assert source.config.qkv_bias == folder.config.qkv_bias
    assert source.config.rope == folder.config.rope
    weights.check_shapes(source, source.config)
    for tensor, shape in folder.shapes().items():
        np.testing.assert_array_equal(
            source.rows(tensor, 0, shape[0]), folder.rows(tensor, 0, shape[0]).astype(np.float32)
        )


def test_rope_frequencies_tensor(tmp_path: Path) -> None:
    """The llama3 scaling as llama.cpp's converter computes it."""
    folder = HfFolder(tiny_folder("llama3"))
    rope, head_dim = folder.config.rope, folder.config.head_dim
    plain, _ = inverse_frequencies(RopeConfig(theta=rope.theta), head_dim)
    divisors = []
    for frequency in plain.astype(np.float64):
        wavelength = 2 * math.pi / frequency
        turns = rope.original_max_context / wavelength
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / rope.factor + blend))
    tensors = gguf_tensors(tiny_folder("llama3"), permute=True)
    tensors["rope_freqs.weight"] = np.array(divisors, np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(tiny_folder("llama3")), tensors)
    source = GgufFile(path)
    weights.check_shapes(source, source.config)
    np.testing.assert_allclose(
        inverse_frequencies(source.config.rope, head_dim)[0],
        inverse_frequencies(rope, head_dim)[0],
        rtol=1e-6,
    )


def test_rope_frequencies_tensor_of_the_wrong_size(tmp_path: Path) -> None:
    tensors = _tensors() | {"rope_freqs.weight": np.ones(3, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", _metadata(), tensors)
    with pytest.raises(ModelFileError, match="must hold 32 positive values, got 3"):
        GgufFile(path)


def test_yarn(tmp_path: Path) -> None:
    changes = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    path = write_gguf(tmp_path / "m.gguf", "qwen2", _metadata(**changes), _tensors())
    config = GgufFile(path).config
    assert config.rope == RopeConfig(
        theta=10000.0, kind="yarn", factor=4.0, original_max_context=128
    )
    assert config.max_context == 512
    changes["rope.scaling.attn_factor"] = 0.5
    path = write_gguf(tmp_path / "m.gguf", "qwen2", _metadata(**changes), _tensors())
    assert GgufFile(path).config.rope.attention_factor == pytest.approx(
        0.5 * (0.1 * math.log(4.0) + 1.0)
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.scaling.factor": 2.0}, RopeConfig(theta=10000.0, kind="linear", factor=2.0)),
        ({"rope.scale_linear": 2.0}, RopeConfig(theta=10000.0, kind="linear", factor=2.0)),
        ({"rope.scaling.factor": 0.0}, RopeConfig(theta=10000.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, RopeConfig(theta=10000.0)),
    ],
)
def test_scaling_factor_without_a_type(
    tmp_path: Path, changes: dict[str, Any], expected: RopeConfig
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", _metadata(**changes), _tensors())
    rope = GgufFile(path).config.rope
    assert dataclasses.replace(rope, original_max_context=0) == expected


def test_smollm2() -> None:
    source = GgufFile(smollm2_path())
    weights.check_shapes(source, source.config)
    config = source.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_embeddings
    assert (config.bos_id, config.eos_ids) == (1, (2,))
    assert config.max_context == 8192


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma2", {}, "architecture 'gemma2' is not supported; supported: llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "llama with 8 experts is not supported"),
        ("llama", {"attention.sliding_window": 64}, "sliding-window attention .window 64"),
        ("llama", {"attention.value_length": 32}, "attention.value_length 32 differs from the"),
        ("llama", {"rope.dimension_count": 32}, "rope.dimension_count 32 differs from the head"),
        (
            "llama",
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            "rope scaling type 'longrope' is not supported",
        ),
        ("llama", {"attention.head_count_kv": [2, 4]}, "head_count_kv differs between layers"),
    ],
)
def test_unsupported_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture, _metadata(**changes), _tensors())
    with pytest.raises(UnsupportedModelError, match=message):
        GgufFile(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": None}, "metadata lacks 'llama.context_length'"),
        ({"attention.layer_norm_rms_epsilon": None}, "lacks 'llama.attention.layer_norm_rms_eps"),
        ({"embedding_length": 0}, "llama.embedding_length must be a positive integer, got 0"),
        ({"block_count": "x"}, "llama.block_count must be a positive integer, got 'x'"),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", _metadata(**changes), _tensors())
    with pytest.raises(ModelFileError, match=message):
        GgufFile(path)


def test_per_layer_lists_of_one_value(tmp_path: Path) -> None:
    metadata = _metadata(**{"attention.head_count": [4, 4], "feed_forward_length": [256]})
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, _tensors())
    assert GgufFile(path).config.num_q_heads == 4


def test_split_files(tmp_path: Path) -> None:
    metadata = _metadata() | {"split.count": 3}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, _tensors())
    with pytest.raises(UnsupportedModelError, match="one of 3 parts of a split GGUF file"):
        GgufFile(path)


def test_unreadable_storage_type(tmp_path: Path) -> None:
    tensors = _tensors() | {"blk.0.attn_q.weight": np.ones((256, 256), np.int8)}
    path = write_gguf(tmp_path / "m.gguf", "llama", _metadata(), tensors)
    with pytest.raises(UnsupportedModelError, match="'blk.0.attn_q.weight' has storage type I8"):
        GgufFile(path)


def test_missing_embedding(tmp_path: Path) -> None:
    tensors = _tensors()
    del tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", _metadata(), tensors)
    with pytest.raises(ModelFileError, match="missing tensor 'token_embd.weight'"):
        GgufFile(path)


def test_unknown_tensor_keeps_its_name(tmp_path: Path) -> None:
    tensors = _tensors() | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", _metadata(), tensors)
    source = GgufFile(path)
    with pytest.raises(UnsupportedModelError, match="no place for tensor 'blk.0.attn_sinks.wei"):
        weights.check_shapes(source, source.config)


def test_end_of_turn_tokens(tmp_path: Path) -> None:
    metadata = _metadata() | byte_vocabulary()
    metadata |= {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 257}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, _tensors())
    assert GgufFile(path).config.eos_ids == (257, 5)
