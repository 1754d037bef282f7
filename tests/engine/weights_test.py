# SPDX-License-Identifier: Apache-2.0
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from kvferry.engine import weights
from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.hf_folder import HfFolder
from kvferry.engine.sharding import param_shapes
from kvferry.tests.engine.checkpoints import TINY_NAMES, Array, tiny_folder


@dataclasses.dataclass
class MemorySource:
    """A checkpoint in memory, to add, drop and change tensors."""

    tensors: dict[str, Array]
    description: str = "memory"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self.tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> Array:
        return self.tensors[name][start:stop]


def _in_memory(folder: HfFolder) -> MemorySource:
    return MemorySource(
        {name: folder.rows(name, 0, shape[0]) for name, shape in folder.shapes().items()}
    )


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_value_arrives_in_its_place(name: str) -> None:
    folder = HfFolder(tiny_folder(name))
    config = folder.config
    weights.check_shapes(folder, config)
    params = weights.build_params(folder, config, np.float32)
    tensors = {k: v.astype(np.float32) for k, v in _in_memory(folder).tensors.items()}
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["final_norm"], tensors["model.norm.weight"])
    assert ("lm_head" in params) == (not config.tie_embeddings)
    if not config.tie_embeddings:
        np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    fused = {
        "wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "wo": ("self_attn.o_proj",),
        "w_gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "w_down": ("mlp.down_proj",),
    }
    bias_names = {"wqkv": "bqkv", "wo": "bo", "w_gate_up": "b_gate_up", "w_down": "b_down"}
    for i, layer in enumerate(params["layers"]):
        prefix = f"model.layers.{i}."
        for key, parts in fused.items():
            expected = np.concatenate([tensors[f"{prefix}{part}.weight"] for part in parts])
            np.testing.assert_array_equal(layer[key], expected.T)
            if f"{prefix}{parts[0]}.bias" in tensors:
                bias = np.concatenate([tensors[f"{prefix}{part}.bias"] for part in parts])
                np.testing.assert_array_equal(layer[bias_names[key]], bias)
            else:
                assert bias_names[key] not in layer
        norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if config.qk_norm:
            norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
        for key, part in norms.items():
            np.testing.assert_array_equal(layer[key], tensors[f"{prefix}{part}.weight"])


@pytest.mark.parametrize("name", TINY_NAMES)
def test_shapes_are_those_that_are_announced_for_compilation(name: str) -> None:
    folder = HfFolder(tiny_folder(name))
    params = weights.build_params(folder, folder.config, np.float32)
    found = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    announced = jax.tree.map(lambda x: (x.shape, x.dtype), param_shapes(folder.config, np.float32))
    assert found == announced


def test_cast_to_another_precision() -> None:
    folder = HfFolder(tiny_folder("qwen2"))
    exact = weights.build_params(folder, folder.config, np.float32)
    rounded = weights.build_params(folder, folder.config, ml_dtypes.bfloat16)
    for leaf, expected in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        assert leaf.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(leaf, expected.astype(ml_dtypes.bfloat16))


def test_stored_bfloat16_survives_unrounded() -> None:
    folder = HfFolder(tiny_folder("qwen3"))
    params = weights.build_params(folder, folder.config, ml_dtypes.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(params["layers"][1]["w_down"], folder.rows(name, 0, 64).T)


def test_jax_takes_the_arrays_without_a_copy() -> None:
    folder = HfFolder(tiny_folder("qwen2"))
    params = weights.build_params(folder, folder.config, np.float32)
    for leaf in jax.tree.leaves(params):
        assert leaf.ctypes.data % 64 == 0
        placed = jax.device_put(leaf, jax.devices()[0])
        assert placed.unsafe_buffer_pointer() == leaf.ctypes.data


def test_large_tensors_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = HfFolder(tiny_folder("llama_bias"))
    expected = weights.build_params(folder, folder.config, np.float32)
    monkeypatch.setattr(weights, "_BLOCK_VALUES", 130)
    found = weights.build_params(folder, folder.config, np.float32)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_missing_tensors_are_named() -> None:
    folder = HfFolder(tiny_folder("qwen2"))
    source = _in_memory(folder)
    del source.tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(
        ModelFileError, match="memory: missing tensor 'model.layers.1.self_attn.k_proj.bias'"
    ):
        weights.check_shapes(source, folder.config)
    source.tensors.clear()
    with pytest.raises(ModelFileError, match="missing tensors 'model.embed_tokens.* and 21 more"):
        weights.check_shapes(source, folder.config)


def test_unknown_tensors_are_named() -> None:
    folder = HfFolder(tiny_folder("qwen2"))
    source = _in_memory(folder)
    source.tensors["model.layers.0.self_attn.sinks"] = np.zeros(4)
    with pytest.raises(
        UnsupportedModelError,
        match="Qwen2ForCausalLM has no place for tensor 'model.layers.0.self_attn.sinks'",
    ):
        weights.check_shapes(source, folder.config)


def test_known_leftovers_are_not_read() -> None:
    folder = HfFolder(tiny_folder("qwen2"))
    assert folder.config.tie_embeddings
    source = _in_memory(folder)
    weights.check_shapes(source, folder.config)
    before = weights.fingerprint(source, folder.config)
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"]
    source.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(5)
    source.tensors["model.rotary_emb.inv_freq"] = np.zeros(5)
    weights.check_shapes(source, folder.config)
    assert weights.fingerprint(source, folder.config) == before


def test_lm_head_is_not_a_leftover_when_untied() -> None:
    folder = HfFolder(tiny_folder("qwen3"))
    source = _in_memory(folder)
    del source.tensors["lm_head.weight"]
    with pytest.raises(ModelFileError, match="missing tensor 'lm_head.weight'"):
        weights.check_shapes(source, folder.config)


def test_wrong_shape_is_named() -> None:
    folder = HfFolder(tiny_folder("qwen2"))
    source = _in_memory(folder)
    source.tensors["model.norm.weight"] = np.zeros(61, np.float32)
    with pytest.raises(
        ModelFileError,
        match=r"'model.norm.weight' has shape \(61,\), the configuration asks for \(60,\)",
    ):
        weights.check_shapes(source, folder.config)


def test_fingerprint_tells_checkpoints_apart() -> None:
    folder = HfFolder(tiny_folder("qwen2"))
    source = _in_memory(folder)
    print_before = weights.fingerprint(source, folder.config)
    assert print_before == weights.fingerprint(folder, folder.config)
    assert len(print_before) == 64 and int(print_before, 16) >= 0
    changed: list[Any] = [print_before]
    other = dataclasses.replace(folder.config, rms_norm_eps=1e-5)
    changed.append(weights.fingerprint(source, other))
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        tensor = source.tensors[name].copy()
        tensor.flat[3] += 1e-6
        altered = MemorySource(source.tensors | {name: tensor})
        changed.append(weights.fingerprint(altered, folder.config))
    assert len(set(changed)) == 4
