# SPDX-License-Identifier: Apache-2.0
import json
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.hf_folder import HfFolder
from kvferry.tests.engine.checkpoints import copy_tiny, edit_json, tiny_folder

_INDEX = "model.safetensors.index.json"
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen2", np.float32), ("llama_yarn", np.float16), ("qwen3", ml_dtypes.bfloat16)],
)
def test_one_file(name: str, dtype: Any) -> None:
    folder = HfFolder(tiny_folder(name))
    expected = load_file(tiny_folder(name) / "model.safetensors")
    assert folder.shapes() == {name: value.shape for name, value in expected.items()}
    for tensor, values in expected.items():
        rows = folder.rows(tensor, 0, 10**6)
        assert rows.dtype == dtype
        np.testing.assert_array_equal(rows, values)
        np.testing.assert_array_equal(folder.rows(tensor, 1, 3), values[1:3])


def test_shards() -> None:
    folder = HfFolder(tiny_folder("llama3"))
    parts = [load_file(tiny_folder("llama3") / name) for name in _SHARDS]
    assert all(parts)
    expected = parts[0] | parts[1]
    assert folder.shapes().keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(folder.rows(tensor, 0, values.shape[0]), values)


def test_one_file_of_another_name(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert HfFolder(folder).shapes()


def test_generation_config_adds_ends_of_turn(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [300, 257]}')
    assert HfFolder(folder).config.eos_ids == (300, 257)


def test_config_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="config.json is missing; a model folder holds"):
        HfFolder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config.json: not valid JSON"), ("[]", "config.json: expected a JSON object, got list")],
)
def test_config_malformed(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=message):
        HfFolder(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, size: int) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    start = time.monotonic()
    with pytest.raises(ModelFileError, match="model.safetensors: truncated or damaged"):
        HfFolder(folder)
    assert time.monotonic() - start < 1.0


def test_truncated_shard(tmp_path: Path) -> None:
    folder = copy_tiny("llama3", tmp_path)
    path = folder / _SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=f"{_SHARDS[1]}: truncated or damaged"):
        HfFolder(folder)


def test_missing_shard(tmp_path: Path) -> None:
    folder = copy_tiny("llama3", tmp_path)
    (folder / _SHARDS[0]).unlink()
    with pytest.raises(ModelFileError, match=f"{_SHARDS[0]} is missing"):
        HfFolder(folder)


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = copy_tiny("llama3", tmp_path)
    (folder / _INDEX).unlink()
    with pytest.raises(ModelFileError, match=f"2 safetensors files, no {_INDEX}"):
        HfFolder(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no safetensors file$"):
        HfFolder(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match="pytorch_model.bin must be converted to safetensors"):
        HfFolder(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "holds no weight_map"),
        ({"x": "../model.safetensors"}, "'../model.safetensors' is not the name of a file in this"),
        ({"x": 3}, "3 is not the name of a file"),
        ({"x": _SHARDS[0]}, f"lists tensor 'x', but {_SHARDS[0]} does not hold it"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: Any, message: str) -> None:
    folder = copy_tiny("llama3", tmp_path)
    edit_json(folder / _INDEX, weight_map=weight_map)
    with pytest.raises(ModelFileError, match=message):
        HfFolder(folder)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = copy_tiny("llama3", tmp_path)
    first = load_file(folder / _SHARDS[0])
    name = sorted(first)[0]
    second = load_file(folder / _SHARDS[1]) | {name: first[name]}
    save_file(second, folder / _SHARDS[1])
    with pytest.raises(ModelFileError, match=f"tensor '{name}' is in another file too"):
        HfFolder(folder)


def test_unsupported_tensor_type(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    values = load_file(folder / "model.safetensors")
    values["model.norm.weight"] = values["model.norm.weight"].astype(np.int8)
    save_file(values, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="'model.norm.weight' has type I8"):
        HfFolder(folder)


def test_unsupported_architecture_before_any_weight(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    (folder / "model.safetensors").unlink()
    edit_json(folder / "config.json", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        HfFolder(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 331
