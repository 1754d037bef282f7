# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for tests: those under data/, and GGUF files written on the spot."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvferry.demo.model import default_model_path
from kvferry.engine.hf_folder import HfFolder

DATA = Path(__file__).parent / "data"
TINY_NAMES = ("llama3", "llama_bias", "llama_yarn", "mistral", "qwen2", "qwen3")

Array = npt.NDArray[Any]


def tiny_folder(name: str) -> Path:
    """Returns one of the small random checkpoints made by tools/make_oracle.py."""
    return DATA / "tiny" / name


def copy_tiny(name: str, target: Path) -> Path:
    """Copies a small checkpoint, to damage the copy."""
    return Path(shutil.copytree(tiny_folder(name), target / name))


def smollm2_path() -> Path:
    """Returns the real model of the tests, a Q4_1 GGUF file."""
    return default_model_path()


def read_data(name: str) -> Any:
    """Reads a JSON file of reference data."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def edit_json(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON object in place; None removes a key."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    value = {key: item for key, item in value.items() if item is not None}
    path.write_text(json.dumps(value), encoding="utf-8")


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array | tuple[Array, gguf.GGMLQuantizationType]],
) -> Path:
    """Writes a GGUF file with the `gguf` package.

    Args:
        path: The file to write.
        architecture: Value of general.architecture.
        metadata: Further keys; a key that starts with a dot belongs to the architecture.
        tensors: Name to values; with a type, the values are quantised to it, unless they are
            bytes (uint8), which are stored as they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, f"{architecture}{key}" if key.startswith(".") else key, value)
    for name, tensor in tensors.items():
        values, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        if kind is not None and values.dtype != np.uint8:
            values = gguf.quantize(values, kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_vocabulary() -> dict[str, Any]:
    """Returns GGUF tokenizer metadata like that of the small checkpoints: bytes, two specials."""
    backend = json.loads((tiny_folder("llama3") / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = backend["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[258] = "Ġt"  # the package writes no empty list of merges
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if 256 <= i < 258 else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }


def llama_metadata(folder: Path) -> dict[str, Any]:
    """Returns the GGUF metadata that llama.cpp's converter writes for a Llama folder."""
    config = HfFolder(folder).config
    return {
        ".block_count": config.num_layers,
        ".context_length": config.max_context,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_q_heads,
        ".attention.head_count_kv": config.num_kv_heads,
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".rope.freq_base": config.rope.theta,
        ".rope.dimension_count": config.head_dim,
        **byte_vocabulary(),
    }


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_tensors(folder: Path, permute: bool) -> dict[str, Array]:
    """Returns the tensors of a folder as llama.cpp's converter stores them, float32.

    Args:
        folder: A model folder.
        permute: Interleave the halves of Q and K heads, as for architecture `llama`.
    """
    source = HfFolder(folder)
    config = source.config
    heads = {"self_attn.q_proj": config.num_q_heads, "self_attn.k_proj": config.num_kv_heads}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for name, shape in source.shapes().items():
        values = source.rows(name, 0, shape[0]).astype(np.float32)
        stem, _, kind = name.rpartition(".")
        if kind == "inv_freq":
            continue
        if stem in top:
            tensors[f"{top[stem]}.{kind}"] = values
            continue
        _, _, layer, part = stem.split(".", 3)
        if permute and part in heads:
            pairs = values.reshape(heads[part], 2, config.head_dim // 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        tensors[f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"] = values
    return tensors
