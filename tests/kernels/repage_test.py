# SPDX-License-Identifier: Apache-2.0
"""Pools whose page sizes differ by an integer factor, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels.multi_layer_copy import multi_layer_copy, small_page_ids
from kvferry.kernels.multi_layer_copy.reference import copy_layers
from kvferry.tests.kernels import oracle

_XLA: dict[str, Any] = {"implementation": "xla"}
_SIMULATED: dict[str, Any] = {
    "implementation": "mosaic_tpu",
    "interpret": pltpu.InterpretParams(detect_races=True),
}
both = pytest.mark.parametrize("how", [_XLA, _SIMULATED], ids=["xla", "mosaic_tpu"])
_SMALL, _HEADS = 4, (2, 128)


def _tokens(pool: np.ndarray) -> np.ndarray:
    """Returns a pool as one row per token."""
    return pool.reshape(-1, *pool.shape[2:])


@both
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_small_pages_into_large_ones(factor: int, how: dict[str, Any]) -> None:
    """A prompt of 7 small pages arrives in order and lands in large pages anywhere."""
    arrived = oracle.layers(7, (_SMALL, *_HEADS), 2)
    pool = oracle.layers(9, (factor * _SMALL, *_HEADS), 2, seed=1)
    table = [5, 0, 8, 3][: -(-7 // factor)]
    results = multi_layer_copy(
        src_array=oracle.device(arrived),
        dest_array=oracle.device(pool),
        src_offsets=np.arange(7),
        dest_offsets=small_page_ids(table, factor)[:7],
        chunk_sizes=np.ones(7, np.int32),
        repage=True,
        **how,
    )
    for source, before, result in zip(arrived, pool, results, strict=True):
        expected = before.copy()
        for position in range(7 * _SMALL):
            page, row = divmod(position, factor * _SMALL)
            expected[table[page], row] = _tokens(source)[position]
        np.testing.assert_array_equal(result, expected)


@both
@pytest.mark.parametrize("factor", [2, 4])
def test_large_pages_into_small_ones(factor: int, how: dict[str, Any]) -> None:
    """Each large page becomes a run of small ones, which need not lie together."""
    pool = oracle.layers(6, (factor * _SMALL, *_HEADS), 2)
    dest = oracle.layers(20, (_SMALL, *_HEADS), 2, seed=1)
    wanted, table = [4, 1], list(range(19, 19 - 2 * factor, -1))
    results = multi_layer_copy(
        src_array=oracle.device(pool),
        dest_array=oracle.device(dest),
        src_offsets=small_page_ids(wanted, factor),
        dest_offsets=table,
        chunk_sizes=np.ones(2 * factor, np.int32),
        repage=True,
        **how,
    )
    for source, before, result in zip(pool, dest, results, strict=True):
        expected = before.copy()
        tokens = _tokens(source[wanted])
        for index, page in enumerate(table):
            expected[page] = tokens[index * _SMALL : (index + 1) * _SMALL]
        np.testing.assert_array_equal(result, expected)


@both
def test_equal_page_sizes_are_no_special_case(how: dict[str, Any]) -> None:
    src, dest = oracle.layers(3, (4, 128), 1), oracle.layers(5, (4, 128), 1, seed=1)
    runs = [oracle.Run(0, 3, 2)]
    results = multi_layer_copy(
        src_array=oracle.device(src),
        dest_array=oracle.device(dest),
        **oracle.split(runs),
        repage=True,
        **how,
    )
    oracle.assert_equal(results, oracle.copied(src, dest, runs))


@pytest.mark.parametrize("splits", [(1, 2), (2, 1)])
def test_form_for_tpu(splits: tuple[int, int]) -> None:
    """The form of the XLA reference that a TPU gets cuts pages by itself."""
    src = oracle.layers(6, (splits[0] * _SMALL, *_HEADS), 2)
    dest = oracle.layers(7, (splits[1] * _SMALL, *_HEADS), 2, seed=1)
    runs = [oracle.Run(3, 0, 3), oracle.Run(1, 5)]
    chunks = oracle.chunks(runs, len(runs))
    results = copy_layers(
        oracle.device(src), oracle.device(dest), chunks, splits=splits, form="page_loop"
    )

    def cut(arrays: oracle.Arrays, split: int) -> oracle.Arrays:
        return [array.reshape(len(array) * split, _SMALL, *_HEADS) for array in arrays]

    expected = oracle.copied(cut(src, splits[0]), cut(dest, splits[1]), runs)
    oracle.assert_equal(cut(list(map(np.asarray, results)), splits[1]), expected)


def test_small_page_ids() -> None:
    ids = small_page_ids([5, 0], 3)
    assert ids.dtype == np.int32
    assert ids.tolist() == [15, 16, 17, 0, 1, 2]
    assert small_page_ids(np.array([7]), 1).tolist() == [7]
