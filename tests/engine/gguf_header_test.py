# SPDX-License-Identifier: Apache-2.0
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.gguf_header import read_header
from kvferry.tests.engine.checkpoints import (
    gguf_tensors,
    llama_metadata,
    smollm2_path,
    tiny_folder,
    write_gguf,
)


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Path:
    return write_gguf(
        tmp_path / "small.gguf",
        "llama",
        {
            "text": "héllo",
            "yes": True,
            "count": 7,
            "share": 0.5,
            "words": ["a", "", "你好"],
            "numbers": [1, 2, 3],
            "nested.key": "x",
        },
        {
            "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
            "vector": np.arange(5, dtype=np.float16),
            "quantised": (np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
        },
    )


def test_metadata_and_tensors(small: Path) -> None:
    header = read_header(small)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["text"] == "héllo"
    assert header.metadata["yes"] is True
    assert header.metadata["count"] == 7
    assert header.metadata["share"] == 0.5
    assert header.metadata["words"] == ["a", "", "你好"]
    np.testing.assert_array_equal(header.metadata["numbers"], [1, 2, 3])
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
        "matrix": (3, 4),
        "vector": (5,),
        "quantised": (2, 64),
    }
    assert header.tensors["quantised"].kind == gguf.GGMLQuantizationType.Q8_0
    assert header.tensors["quantised"].num_bytes == 2 * 2 * 34
    place = header.tensors["matrix"]
    raw = header.data[place.offset : place.offset + place.num_bytes]
    np.testing.assert_array_equal(raw.view(np.float32), np.arange(12))


def test_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        llama_metadata(tiny_folder("llama3")),
        gguf_tensors(tiny_folder("llama3"), permute=True),
    )
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert len(header.tensors) == len(reader.tensors)
    for expected in reader.tensors:
        tensor = header.tensors[expected.name]
        assert tensor.shape == tuple(int(size) for size in reversed(expected.shape))
        assert (tensor.kind, tensor.offset) == (expected.tensor_type, expected.data_offset)
        assert tensor.num_bytes == expected.n_bytes
    for key, value in header.metadata.items():
        expected_value = reader.fields[key].contents()
        if isinstance(value, np.ndarray):
            value = value.tolist()
        assert value == expected_value


def test_every_truncation_is_reported(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    # The file ends with padding behind the last tensor.
    needed = max(t.offset + t.num_bytes for t in read_header(small).tensors.values())
    for size in range(needed):
        damaged.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"truncated|too short|not a GGUF"):
            read_header(damaged)


def test_truncation_of_a_large_file_is_found_fast(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    shutil.copy(smollm2_path(), damaged)
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size - 1)
    start = time.monotonic()
    with pytest.raises(ModelFileError, match=r"truncated: 98362431 bytes, but tensor '.*' ends at"):
        read_header(damaged)
    assert time.monotonic() - start < 1.0


def _set(offset: int, raw: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:offset] + raw + whole[offset + len(raw) :]


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_set(0, b"GGML"), ModelFileError, "not a GGUF file .it starts with b'GGML'"),
        (_set(4, struct.pack("<I", 1)), UnsupportedModelError, "GGUF version 1 is not supported"),
        (_set(4, struct.pack(">I", 3)), UnsupportedModelError, "big-endian"),
        (_set(8, struct.pack("<Q", 1 << 60)), ModelFileError, "announces 1152921504606846976 tens"),
        (_set(16, struct.pack("<Q", 1 << 60)), ModelFileError, "metadata keys, more than its"),
        (_set(24, struct.pack("<Q", 1 << 40)), ModelFileError, "bytes of text, more than its"),
        (_set(32, b"\xff"), ModelFileError, "not UTF-8"),
    ],
)
def test_damage_is_reported(
    small: Path, damage: Callable[[bytes], bytes], error: type[Exception], message: str
) -> None:
    small.write_bytes(damage(small.read_bytes()))
    with pytest.raises(error, match=message):
        read_header(small)


def _replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole.replace(old, new, 1)


_MATRIX = struct.pack("<Q", 6) + b"matrix" + struct.pack("<I", 2)
_VECTOR = struct.pack("<Q", 6) + b"vector"
_COUNT = struct.pack("<Q", 5) + b"count"
_WORDS = struct.pack("<Q", 5) + b"words"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            _replace(_MATRIX, struct.pack("<Q", 6) + b"matrix" + struct.pack("<I", 9)),
            ModelFileError,
            "tensor 'matrix' has 9 dimensions",
        ),
        (
            _replace(_VECTOR, struct.pack("<Q", 6) + b"matrix"),
            ModelFileError,
            "tensor 'matrix' is listed twice",
        ),
        (
            _replace(_COUNT + struct.pack("<I", 4), _COUNT + struct.pack("<I", 77)),
            ModelFileError,
            "unknown metadata type 77",
        ),
        (
            _replace(_WORDS + struct.pack("<II", 9, 8), _WORDS + struct.pack("<II", 9, 77)),
            ModelFileError,
            "unknown metadata array type 77",
        ),
        (
            _replace(struct.pack("<QQI", 4, 3, 0), struct.pack("<QQI", 4, 3, 250)),
            UnsupportedModelError,
            "tensor 'matrix' has the unknown storage type 250",
        ),
        (
            _replace(struct.pack("<QQI", 4, 3, 0), struct.pack("<QQI", 4, 3, 8)),
            ModelFileError,
            r"tensor 'matrix' of shape \(3, 4\) cannot be stored as Q8_0",
        ),
    ],
)
def test_contradictions_are_reported(
    small: Path, damage: Callable[[bytes], bytes], error: type[Exception], message: str
) -> None:
    before = small.read_bytes()
    after = damage(before)
    assert after != before
    small.write_bytes(after)
    with pytest.raises(error, match=message):
        read_header(small)


def test_no_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "empty.gguf", "llama", {}, {})
    with pytest.raises(ModelFileError, match="the file holds no tensors"):
        read_header(path)


def test_alignment_must_be_a_power_of_two(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "odd.gguf", "llama", {"general.alignment": 48}, {"x": np.ones(4, np.float32)}
    )
    with pytest.raises(ModelFileError, match="general.alignment 48 is not a power of two"):
        read_header(path)
