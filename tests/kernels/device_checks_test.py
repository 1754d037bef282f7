# SPDX-License-Identifier: Apache-2.0
"""checks="device": chunks that must not run copy nothing and are reported, traced or not."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels.chunks import (
    CHUNK_BAD_DEST,
    CHUNK_BAD_SIZE,
    CHUNK_BAD_SRC,
    CHUNK_OK,
    CHUNK_OVERLAP,
    CHUNK_UNUSED,
    guard_chunks,
)
from kvferry.kernels.multi_layer_copy import multi_layer_copy
from kvferry.tests.kernels import oracle
from kvferry.tests.kernels.oracle import Run
from kvferry.tests.kernels.simulator import PARAMS, params_id, watched

_MAX = 2**31 - 1

# Sources have 6 and 5 pages, destinations 12 and 9.
_LIST = [
    (Run(0, 2, 2), CHUNK_OK),
    (Run(3, 0, 3), CHUNK_BAD_SRC),
    (Run(4, 5, 1), CHUNK_OK),
    (Run(0, 8, 2), CHUNK_BAD_DEST),
    (Run(-1, 0, 1), CHUNK_BAD_SRC),
    (Run(1, -1, 1), CHUNK_BAD_DEST),
    (Run(1, 6, 0), CHUNK_BAD_SIZE),
    (Run(1, 6, -4), CHUNK_BAD_SIZE),
    (Run(1, 3, 1), CHUNK_OVERLAP),
    (Run(1, 1, 2), CHUNK_OVERLAP),
    (Run(2, 7, _MAX), CHUNK_BAD_SRC),
    (Run(_MAX, 7, 1), CHUNK_BAD_SRC),
    (Run(2, _MAX, 1), CHUNK_BAD_DEST),
    (Run(2, 8, 1), CHUNK_OK),
    (Run(3, 0, 1), CHUNK_UNUSED),
    (Run(99, 99, 99), CHUNK_UNUSED),
]
_RUNS = [run for run, _ in _LIST]
_STATUS = [status for _, status in _LIST]
_COUNT = _STATUS.index(CHUNK_UNUSED)
_GOOD = [run for run, status in _LIST if status == CHUNK_OK]


def _layers() -> tuple[oracle.Arrays, oracle.Arrays]:
    src = oracle.layers(6, (4, 128), 1) + oracle.layers(5, (4, 128), 1)
    dest = oracle.layers(12, (4, 128), 1, seed=1) + oracle.layers(9, (4, 128), 1, seed=1)
    return src, dest


def _copy(src: Any, dest: Any, listed: Any, count: Any, **how: Any) -> Any:
    return multi_layer_copy(
        src_array=src, dest_array=dest, **listed, num_chunks=count, checks="device", **how
    )


@pytest.mark.parametrize("traced", [False, True])
def test_refused_chunks_copy_nothing(traced: bool) -> None:
    src, dest = _layers()
    copy = jax.jit(_copy, donate_argnums=1) if traced else _copy
    results, status = copy(oracle.device(src), oracle.device(dest), oracle.split(_RUNS), _COUNT)
    oracle.assert_equal(results, oracle.copied(src, dest, _GOOD))
    assert status.tolist() == _STATUS


@pytest.mark.parametrize("params", PARAMS, ids=params_id)
def test_refused_chunks_copy_nothing_in_the_kernel(params: pltpu.InterpretParams) -> None:
    src, dest = _layers()
    with watched(params):
        results, status = jax.block_until_ready(
            _copy(
                oracle.device(src),
                oracle.device(dest),
                oracle.split(_RUNS),
                _COUNT,
                interpret=params,
            )
        )
    oracle.assert_equal(results, oracle.copied(src, dest, _GOOD))
    assert status.tolist() == _STATUS


def test_num_chunks_beyond_the_list_means_all() -> None:
    src, dest = _layers()
    runs = [Run(0, 0), Run(1, 3)]
    results, status = _copy(oracle.device(src), oracle.device(dest), oracle.split(runs), 77)
    oracle.assert_equal(results, oracle.copied(src, dest, runs))
    assert status.tolist() == [CHUNK_OK, CHUNK_OK]


def test_nothing_to_report() -> None:
    chunks, status = guard_chunks(oracle.chunks([Run(0, 1), Run(1, 2)], 2), [4], [4])
    assert status.tolist() == [CHUNK_OK, CHUNK_OK]
    assert chunks.sizes.tolist() == [1, 1]


def test_a_chunk_refused_for_its_range_blocks_no_other() -> None:
    chunks, status = guard_chunks(oracle.chunks([Run(9, 0, 4), Run(0, 1)], 2), [4], [8])
    assert status.tolist() == [CHUNK_BAD_SRC, CHUNK_OK]
    assert chunks.sizes.tolist() == [0, 1]
