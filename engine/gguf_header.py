# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file: metadata and the table of tensors.

The `gguf` package has a reader of its own, but it keeps every token of the vocabulary as a NumPy
view (over two seconds for 49k tokens) and checks no length, so that a truncated file shows up as
an obscure error late. Here every length is compared with the file size before it is used; the
block sizes of the quantised types still come from that package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvferry.engine.errors import ModelFileError, UnsupportedModelError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_TYPE_STRING, _TYPE_ARRAY, _TYPE_BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"},
    **{_TYPE_BOOL: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"},
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        name: Its GGUF name.
        shape: Its logical shape, slowest dimension first ([out, in] for a matrix).
        kind: Storage type.
        offset: First byte, from the start of the file.
        num_bytes: Stored size.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """A parsed header.

    Attributes:
        path: The file.
        metadata: Key to value; numbers, booleans, strings, lists of strings, NumPy arrays.
        tensors: Name to place.
        data: The whole file, mapped, uint8.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: npt.NDArray[np.uint8]


def read_header(path: Path) -> GgufHeader:
    """Maps a GGUF file and parses its header.

    Args:
        path: The file.

    Returns:
        The header; the tensor data stays on disk until it is read.

    Raises:
        ModelFileError: The file is not GGUF, is truncated, or contradicts itself.
        UnsupportedModelError: A version, byte order or tensor type that cannot be read.
    """
    if path.stat().st_size < 24:
        raise ModelFileError(f"{path}: {path.stat().st_size} bytes is too short for a GGUF file")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapped, np.uint8)
    cursor = _Cursor(path, memoryview(mapped))
    if cursor.take(4) != _MAGIC:
        raise ModelFileError(f"{path}: not a GGUF file (it starts with {bytes(data[:4])!r})")
    version = cursor.scalar("<u4")
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{path}: big-endian GGUF files are not supported")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{path}: GGUF version {version} is not supported, 2 and 3 are")
    num_tensors, num_keys = cursor.scalar("<u8"), cursor.scalar("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.bounded(num_keys, 12, "metadata keys")):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<u4"))
    infos = [cursor.tensor_info() for _ in range(cursor.bounded(num_tensors, 24, "tensors"))]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ModelFileError(f"{path}: general.alignment {alignment!r} is not a power of two")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ModelFileError(f"{path}: tensor {name!r} is listed twice")
        tensors[name] = _place(path, name, shape, kind, base + offset)
    _check_size(path, tensors, data.size)
    return GgufHeader(path, metadata, tensors, data)


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        storage = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} has the unknown storage type {kind}"
        ) from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[storage]
    if not shape or shape[-1] % block:
        raise ModelFileError(
            f"{path}: tensor {name!r} of shape {shape} cannot be stored as {storage.name}, whose "
            f"blocks hold {block} values"
        )
    return GgufTensor(name, shape, storage, offset, math.prod(shape) // block * block_bytes)


def _check_size(path: Path, tensors: dict[str, GgufTensor], size: int) -> None:
    if not tensors:
        raise ModelFileError(f"{path}: the file holds no tensors")
    last = max(tensors.values(), key=lambda tensor: tensor.offset + tensor.num_bytes)
    needed = last.offset + last.num_bytes
    if size < needed:
        raise ModelFileError(
            f"{path}: truncated: {size} bytes, but tensor {last.name!r} ends at byte {needed}; "
            "download or copy the file again"
        )


class _Cursor:
    """Reads forward through the header; refuses to read past the end of the file."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self._path = path
        self._view = view
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._view):
            raise ModelFileError(
                f"{self._path}: truncated: {len(self._view)} bytes, but the header goes on to at "
                f"least byte {end}; download or copy the file again"
            )
        raw = bytes(self._view[self.position : end])
        self.position = end
        return raw

    def bounded(self, count: int, min_bytes: int, what: str) -> int:
        """Refuses a count that the rest of the file cannot hold, before looping over it."""
        if count * min_bytes > len(self._view) - self.position:
            raise ModelFileError(
                f"{self._path}: truncated or damaged: the header announces {count} {what}, more "
                f"than its {len(self._view)} bytes can hold"
            )
        return count

    def scalar(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize), kind)[0].item()

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        raw = self.take(self.bounded(length, 1, "bytes of text"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._path}: a text in the header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _TYPE_STRING:
            return self.string()
        if kind == _TYPE_ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelFileError(f"{self._path}: unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> Any:
        kind, count = self.scalar("<u4"), self.scalar("<u8")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            self.bounded(count, dtype.itemsize, "array values")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind not in (_TYPE_STRING, _TYPE_ARRAY):
            raise ModelFileError(f"{self._path}: unknown metadata array type {kind}")
        self.bounded(count, 8, "array values")
        return [self.value(kind) for _ in range(count)]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        rank = self.scalar("<u4")
        if rank > _MAX_DIMENSIONS:
            raise ModelFileError(f"{self._path}: tensor {name!r} has {rank} dimensions")
        fastest_first = struct.unpack(f"<{rank}Q", self.take(8 * rank))
        return name, fastest_first[::-1], self.scalar("<u4"), self.scalar("<u8")
