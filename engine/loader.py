# SPDX-License-Identifier: Apache-2.0
"""Loads a model: configuration, weights and tokenizer, from a GGUF file or a model folder.

1. Open the checkpoint (`HfFolder` or `GgufFile`): configuration, names, shapes and sizes; no
   weight is read, so a wrong or truncated file fails within a fraction of a second.
2. Build the tokenizer.
3. Compare the tensors with what the architecture needs.
4. Read, dequantise, transpose and fuse the weights; take the fingerprint.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from absl import logging

from kvferry.engine import gguf_tokenizer, tokenizer, weights
from kvferry.engine.errors import ModelFileError
from kvferry.engine.gguf_file import GgufFile
from kvferry.engine.hf_folder import HfFolder
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, ready for the runner.

    Attributes:
        config: Its configuration.
        params: Its parameters in host memory, as `weights.build_params` describes them.
        tokenizer: Its tokenizer.
        fingerprint: 64 hexadecimal digits, equal on two servers that run the same checkpoint.
        name: Short name: that of the folder, or of the file without its ending.
    """

    config: ModelConfig
    params: weights.Params
    tokenizer: Tokenizer
    fingerprint: str
    name: str


def load_model(path: str | Path, dtype: npt.DTypeLike = np.float32) -> LoadedModel:
    """Loads a model.

    Args:
        path: A Hugging Face model folder, or a .gguf file. A tokenizer.json beside the .gguf
            file is used instead of the vocabulary inside it.
        dtype: Floating-point type of the parameters, for example float32 or bfloat16.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: The architecture, an option, a tensor or a tokenizer is not
            supported; the message names it.
        ModelFileError: The path does not exist, or a file is missing, truncated or malformed.
    """
    start = time.monotonic()
    path = Path(path).expanduser()
    source = _open(path)
    loaded_tokenizer = _tokenizer(path, source)
    config = dataclasses.replace(source.config, eos_ids=loaded_tokenizer.eos_ids)
    if loaded_tokenizer.vocab_size > config.vocab_size:
        logging.warning(
            "%s: the tokenizer knows %d tokens, the model %d; the others are refused in prompts",
            path,
            loaded_tokenizer.vocab_size,
            config.vocab_size,
        )
    weights.check_shapes(source, config)
    model = LoadedModel(
        config=config,
        params=weights.build_params(source, config, dtype),
        tokenizer=loaded_tokenizer,
        fingerprint=weights.fingerprint(source, config),
        name=path.resolve().stem if path.is_file() else path.resolve().name,
    )
    logging.info("loaded %s (%s) in %.1f s", path, config.architecture, time.monotonic() - start)
    return model


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads only the tokenizer of a model.

    Args:
        path: As for `load_model`.

    Returns:
        The tokenizer.

    Raises:
        UnsupportedModelError: As for `load_model`.
        ModelFileError: As for `load_model`.
    """
    path = Path(path).expanduser()
    return _tokenizer(path, _open(path))


def _open(path: Path) -> HfFolder | GgufFile:
    if path.is_dir():
        return HfFolder(path)
    if not path.exists():
        raise ModelFileError(
            f"{path}: no such file or folder; give a Hugging Face model folder or a .gguf file"
        )
    if path.suffix.lower() != ".gguf":
        raise ModelFileError(f"{path}: neither a model folder nor a .gguf file")
    return GgufFile(path)


def _tokenizer(path: Path, source: HfFolder | GgufFile) -> Tokenizer:
    if isinstance(source, HfFolder):
        return _folder_tokenizer(path, source.config, gguf_template=None)
    template = source.metadata.get("tokenizer.chat_template")
    if (path.parent / "tokenizer.json").is_file():
        logging.info("%s: using the tokenizer.json beside it", path)
        return _folder_tokenizer(path.parent, source.config, gguf_template=template)
    backend = gguf_tokenizer.build_backend(source.metadata, str(path))
    return Tokenizer(
        backend,
        bos_id=source.config.bos_id,
        eos_ids=source.config.eos_ids,
        chat_template=tokenizer.compile_chat_template(
            template, _gguf_special_tokens(source.metadata), str(path)
        ),
    )


def _folder_tokenizer(folder: Path, config: ModelConfig, gguf_template: str | None) -> Tokenizer:
    settings = tokenizer.read_json(folder / "tokenizer_config.json")
    backend = tokenizer.load_backend(folder / "tokenizer.json")
    special_tokens = tokenizer.special_token_texts(settings)
    eos_ids = list(config.eos_ids)
    token_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    if token_id is not None and token_id not in eos_ids:
        eos_ids.append(token_id)
    source = tokenizer.folder_chat_template(folder, settings) or gguf_template
    return Tokenizer(
        backend,
        bos_id=config.bos_id,
        eos_ids=eos_ids,
        chat_template=tokenizer.compile_chat_template(source, special_tokens, str(folder)),
    )


def _gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    texts = {}
    for key, name in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and token_id < len(tokens):
            texts[key] = tokens[token_id]
    return texts
