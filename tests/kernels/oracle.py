# SPDX-License-Identifier: Apache-2.0
"""What the copies must do, in numpy, and arrays to do it on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvferry.kernels.chunks import Chunks, make_chunks

Arrays = list[np.ndarray]


def layers(
    pages: int, page: Sequence[int], count: int, dtype: Any = "float32", seed: int = 0
) -> Arrays:
    """Returns one array per layer, [pages, *page], every layer with data of its own."""
    rng = np.random.default_rng([seed, pages, count])
    dtype = jnp.dtype(dtype)
    shape = (count, pages, *page)
    if jnp.issubdtype(dtype, jnp.floating):
        # Small whole numbers: no NaNs, and exact in every type.
        return list(rng.integers(-8, 9, shape).astype(dtype))
    limits = np.iinfo(dtype)
    return list(rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of pages to copy."""

    src: int
    dest: int
    size: int = 1


def split(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the arguments of multi_layer_copy that describe the runs."""
    return {
        "src_offsets": np.array([run.src for run in runs], np.int32),
        "dest_offsets": np.array([run.dest for run in runs], np.int32),
        "chunk_sizes": np.array([run.size for run in runs], np.int32),
    }


def chunks(runs: Sequence[Run], num_chunks: int) -> Chunks:
    """Returns the runs as the kernels take them, of which the first `num_chunks` are valid."""
    listed = split(runs)
    return make_chunks(
        listed["src_offsets"], listed["dest_offsets"], listed["chunk_sizes"], num_chunks
    )


def copied(src: Arrays, dest: Arrays, runs: Sequence[Run]) -> Arrays:
    """Returns the destinations after the copy."""
    results = [array.copy() for array in dest]
    for result, source in zip(results, src, strict=True):
        for run in runs:
            result[run.dest : run.dest + run.size] = source[run.src : run.src + run.size]
    return results


def assert_equal(actual: Sequence[Any], expected: Arrays) -> None:
    """Compares every page of every layer bit by bit."""
    assert len(actual) == len(expected)
    for layer, (got, want) in enumerate(zip(actual, expected, strict=True)):
        got = np.asarray(got)
        assert got.dtype == want.dtype and got.shape == want.shape
        bits = f"u{want.dtype.itemsize}"
        np.testing.assert_array_equal(got.view(bits), want.view(bits), err_msg=f"layer {layer}")


def device(arrays: Arrays) -> list[Any]:
    """Returns jax arrays that own their memory, so that a donation cannot reach the originals."""
    return [jnp.array(array) for array in arrays]
