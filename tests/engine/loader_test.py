# SPDX-License-Identifier: Apache-2.0
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from kvferry.engine.errors import ModelError, ModelFileError, UnsupportedModelError
from kvferry.engine.loader import load_model, load_tokenizer
from kvferry.tests.engine.checkpoints import (
    TINY_NAMES,
    byte_vocabulary,
    copy_tiny,
    edit_json,
    gguf_tensors,
    llama_metadata,
    smollm2_path,
    tiny_folder,
    write_gguf,
)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_folder(name: str) -> None:
    model = load_model(tiny_folder(name))
    assert model.name == name
    assert model.config.eos_ids == model.tokenizer.eos_ids == (257,)
    assert model.tokenizer.bos_id == 256
    assert model.tokenizer.vocab_size == model.config.vocab_size
    assert len(model.fingerprint) == 64
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(model.params))


def test_smollm2() -> None:
    model = load_model(str(smollm2_path()), ml_dtypes.bfloat16)
    assert model.name == "SmolLM2-135M-Instruct.Q4_1"
    assert model.params["embed"].shape == (49152, 576)
    assert model.params["embed"].dtype == ml_dtypes.bfloat16
    assert len(model.params["layers"]) == 30
    assert model.tokenizer.has_chat_template


def _llama3_gguf(folder: Path, **changes: Any) -> Path:
    metadata = llama_metadata(tiny_folder("llama3")) | changes
    tensors = gguf_tensors(tiny_folder("llama3"), permute=True)
    return write_gguf(folder / "llama3.gguf", "llama", metadata, tensors)


def test_gguf_gives_the_parameters_of_the_folder(tmp_path: Path) -> None:
    folder = load_model(tiny_folder("llama3"))
    file = load_model(_llama3_gguf(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, file.params, folder.params)
    assert file.name == "llama3"


def test_fingerprint_is_that_of_the_checkpoint_not_of_its_precision() -> None:
    first = load_model(tiny_folder("qwen2"))
    assert load_model(tiny_folder("qwen2"), ml_dtypes.bfloat16).fingerprint == first.fingerprint
    assert load_model(tiny_folder("qwen3")).fingerprint != first.fingerprint


def test_tokenizer_json_beside_a_gguf_file_wins(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": "from the gguf file"}
    path = _llama3_gguf(tmp_path, **template, **{"tokenizer.ggml.pre": "unheard-of"})
    with pytest.raises(UnsupportedModelError, match="put the model's tokenizer.json beside"):
        load_model(path)
    shutil.copy(tiny_folder("llama3") / "tokenizer.json", tmp_path)
    tokenizer = load_model(path).tokenizer
    assert tokenizer.encode("ab") == load_tokenizer(tiny_folder("llama3")).encode("ab")
    assert tokenizer.apply_chat_template([]) == "from the gguf file"


def test_chat_template_of_a_gguf_file_may_name_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    path = _llama3_gguf(tmp_path, **{"tokenizer.chat_template": template})
    tokenizer = load_tokenizer(path)
    assert tokenizer.apply_chat_template([{"content": "x"}]) == "<|begin|>x<|end|>"


def test_unknown_path(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="nowhere: no such file or folder; give a Hugging"):
        load_model(tmp_path / "nowhere")


def test_neither_folder_nor_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelFileError, match="model.bin: neither a model folder nor a .gguf file"):
        load_model(tmp_path / "model.bin")


def test_tokenizer_missing(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="tokenizer.json is missing; copy it from the model"):
        load_model(folder)


def test_gguf_without_vocabulary(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    everything = llama_metadata(tiny_folder("llama3"))
    kept = {key: value for key, value in everything.items() if key not in vocabulary}
    tensors = gguf_tensors(tiny_folder("llama3"), permute=True)
    path = write_gguf(tmp_path / "m.gguf", "llama", kept, tensors)
    with pytest.raises(ModelFileError, match="the file holds no vocabulary"):
        load_model(path)


def test_tensors_are_checked_before_they_are_read(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    edit_json(folder / "config.json", intermediate_size=91)
    with pytest.raises(ModelFileError, match=r"has shape \(\d+, \d+\), the configuration asks"):
        load_model(folder)


def test_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    shutil.copy(tiny_folder("qwen3") / "tokenizer.json", folder)
    model = load_model(folder)
    assert model.tokenizer.vocab_size > model.config.vocab_size


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_truncated_model_fails_in_under_a_second(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        path = damaged = tmp_path / "model.gguf"
        shutil.copy(smollm2_path(), path)
    else:
        path = copy_tiny("qwen2", tmp_path)
        damaged = path / "model.safetensors"
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size // 2)
    start = time.monotonic()
    with pytest.raises(ModelError, match="truncated"):
        load_model(path)
    assert time.monotonic() - start < 1.0
