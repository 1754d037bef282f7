# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model folder as a checkpoint: config.json and safetensors files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors relies on)
from safetensors import SafetensorError, safe_open

from kvferry.engine.config_fields import token_ids
from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.tokenizer import read_json
from kvferry.engine.weights import Array

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READABLE = ("F64", "F32", "F16", "BF16")


class HfFolder:
    """One model folder, opened; a `TensorSource`."""

    def __init__(self, folder: Path) -> None:
        """Reads config.json and the headers of the safetensors files.

        Args:
            folder: The model folder.

        Raises:
            ModelFileError: A file is missing, truncated or malformed.
            UnsupportedModelError: The architecture, an option or a tensor type is not supported.
        """
        self._folder = folder
        if not (folder / "config.json").is_file():
            raise ModelFileError(
                f"{folder}: config.json is missing; a model folder holds config.json, "
                "tokenizer.json and *.safetensors"
            )
        self.config = self._read_config()
        self._slices: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._index: Mapping[str, Any] = self._weight_map()
        for file in self._files():
            self._open(file)
        missing = sorted(self._index.keys() - self._shapes.keys())
        if missing:
            raise ModelFileError(
                f"{folder}: {_INDEX} lists tensor {missing[0]!r}, but {self._index[missing[0]]} "
                "does not hold it"
            )

    @property
    def description(self) -> str:
        """The path, for errors."""
        return str(self._folder)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor by name."""
        return self._shapes

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Reads some rows of a tensor.

        Args:
            name: Its name.
            start: First row.
            stop: One past the last row; clipped to the number of rows.

        Returns:
            tensor[start:stop] in the stored type.
        """
        values: Array = self._slices[name][start : min(stop, self._shapes[name][0])]
        return values

    def _read_config(self) -> ModelConfig:
        config = ModelConfig.from_hf(read_json(self._folder / "config.json"))
        generation = read_json(self._folder / "generation_config.json")
        # Instruction-tuned models often list the end of a turn only here.
        extra = token_ids(generation.get("eos_token_id"), "generation_config eos_token_id")
        eos_ids = tuple(dict.fromkeys((*extra, *config.eos_ids)))
        return dataclasses.replace(config, eos_ids=eos_ids)

    def _weight_map(self) -> Mapping[str, Any]:
        path = self._folder / _INDEX
        if not path.is_file():
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{path}: holds no weight_map")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelFileError(f"{path}: {file!r} is not the name of a file in this folder")
        return weight_map

    def _files(self) -> list[Path]:
        if self._index:
            files = [self._folder / name for name in sorted(set(self._index.values()))]
        elif (self._folder / _SINGLE).is_file():
            files = [self._folder / _SINGLE]
        else:
            files = sorted(self._folder.glob("*.safetensors"))
            if len(files) > 1:
                raise ModelFileError(f"{self._folder}: {len(files)} safetensors files, no {_INDEX}")
        if not files:
            other = sorted(path.name for path in self._folder.glob("*.bin"))
            hint = f" ({other[0]} must be converted to safetensors)" if other else ""
            raise ModelFileError(f"{self._folder}: no safetensors file{hint}")
        return files

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise ModelFileError(f"{self._folder}: {path.name} is missing")
        try:
            # Opening maps the file and compares its length with its header.
            with safe_open(path, framework="numpy") as file:
                for name in list(file.keys()):
                    self._add(path, name, file.get_slice(name))
        except SafetensorError as error:
            raise ModelFileError(
                f"{path}: truncated or damaged ({error}); download or copy the file again"
            ) from error

    def _add(self, path: Path, name: str, tensor: Any) -> None:
        if name in self._shapes:
            raise ModelFileError(f"{path}: tensor {name!r} is in another file too")
        if tensor.get_dtype() not in _READABLE:
            raise UnsupportedModelError(
                f"{path}: tensor {name!r} has type {tensor.get_dtype()}, which is not supported; "
                f"supported: {', '.join(_READABLE)}"
            )
        self._shapes[name] = tuple(tensor.get_shape())
        self._slices[name] = tensor
