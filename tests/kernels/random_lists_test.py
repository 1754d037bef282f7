# SPDX-License-Identifier: Apache-2.0
"""Random chunk lists against the numpy oracle, the same ones at every run."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels.copy_to_host import copy_to_device, gather_to_host
from kvferry.kernels.multi_layer_copy import gather_pages, multi_layer_copy, scatter_pages
from kvferry.tests.kernels import oracle
from kvferry.tests.kernels.oracle import Run
from kvferry.tests.kernels.simulator import watched

_EXAMPLES = 300
_LIST = 6  # entries of every list, so that each pair of shapes compiles once
_PAGE = (2, 128)
# Pages of source and destination: scatter, gather, paged to paged.
_POOLS = [(5, 14), (14, 5), (9, 10)]
# The mode in which a wrong order shows in the values, with races watched too.
_SIMULATED = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True)

_profile = hypothesis.settings(
    max_examples=_EXAMPLES, derandomize=True, database=None, deadline=None
)
# A simulated kernel takes a hundred times as long as XLA: some of its examples run at every test,
# all of them among the slow ones.
_some = hypothesis.settings(_profile, max_examples=40)


@st.composite
def _runs(draw: st.DrawFn, src_pages: int, dest_pages: int) -> list[Run]:
    """Draws runs that fit the pools and write no page twice; the rest of the list is poison."""
    free = list(range(dest_pages))
    runs = []
    for _ in range(draw(st.integers(0, _LIST))):
        if not free:
            break
        dest = draw(st.sampled_from(free))
        room = 1
        while dest + room in free and room < src_pages:
            room += 1
        size = draw(st.integers(1, room))
        free = [page for page in free if not dest <= page < dest + size]
        runs.append(Run(draw(st.integers(0, src_pages - size)), dest, size))
    return runs


_poison = st.builds(Run, st.integers(-5, 500), st.integers(-5, 500), st.integers(-500, 500))


def _check_copy(data: st.DataObject, **how: Any) -> None:
    src_pages, dest_pages = data.draw(st.sampled_from(_POOLS))
    runs = data.draw(_runs(src_pages, dest_pages))
    tail = data.draw(st.lists(_poison, min_size=_LIST - len(runs), max_size=_LIST - len(runs)))
    src = oracle.layers(src_pages, _PAGE, 2) + oracle.layers(src_pages, (3,), 1)
    dest = oracle.layers(dest_pages, _PAGE, 2, seed=1) + oracle.layers(dest_pages, (3,), 1, seed=1)
    results = multi_layer_copy(
        src_array=oracle.device(src),
        dest_array=oracle.device(dest),
        **oracle.split(runs + tail),
        num_chunks=len(runs),
        **how,
    )
    oracle.assert_equal(jax.block_until_ready(results), oracle.copied(src, dest, runs))


@_profile
@hypothesis.given(st.data())
def test_multi_layer_copy_in_xla(data: st.DataObject) -> None:
    _check_copy(data, implementation="xla")


def _simulated_copy(data: st.DataObject) -> None:
    with watched(_SIMULATED):
        _check_copy(data, interpret=_SIMULATED, window=2)


@_some
@hypothesis.given(st.data())
def test_multi_layer_copy_in_the_kernel(data: st.DataObject) -> None:
    _simulated_copy(data)


@pytest.mark.slow
@_profile
@hypothesis.given(st.data())
def test_multi_layer_copy_in_the_kernel_at_length(data: st.DataObject) -> None:
    _simulated_copy(data)


def _check_pages(data: st.DataObject, **how: Any) -> None:
    """Out to a slot, or back from it, with ids beyond the valid ones that fit nothing."""
    pool_pages, count = 9, data.draw(st.integers(0, _LIST))
    to_host = data.draw(st.booleans())
    ids = data.draw(
        st.lists(st.integers(0, pool_pages - 1), min_size=count, max_size=count, unique=not to_host)
    )
    rest = st.lists(st.integers(-5, 500), min_size=_LIST - count, max_size=_LIST - count)
    listed = ids + data.draw(rest)
    pools = oracle.layers(pool_pages, _PAGE, 2)
    slots = oracle.layers(_LIST + 1, _PAGE, 2, seed=1)
    if to_host:
        results = gather_to_host(oracle.device(pools), oracle.device(slots), listed, count, **how)
        expected = oracle.copied(pools, slots, [Run(page, row) for row, page in enumerate(ids)])
    else:
        results = copy_to_device(oracle.device(slots), oracle.device(pools), listed, count, **how)
        expected = oracle.copied(slots, pools, [Run(row, page) for row, page in enumerate(ids)])
    oracle.assert_equal(jax.block_until_ready(results), expected)


@_profile
@hypothesis.given(st.data())
def test_copy_to_host_in_xla(data: st.DataObject) -> None:
    _check_pages(data, implementation="xla")


def _simulated_pages(data: st.DataObject) -> None:
    with watched(_SIMULATED):
        _check_pages(data, interpret=_SIMULATED, window=3)


@_some
@hypothesis.given(st.data())
def test_copy_to_host_in_the_kernel(data: st.DataObject) -> None:
    _simulated_pages(data)


@pytest.mark.slow
@_profile
@hypothesis.given(st.data())
def test_copy_to_host_in_the_kernel_at_length(data: st.DataObject) -> None:
    _simulated_pages(data)


@hypothesis.settings(_profile, max_examples=100)
@hypothesis.given(
    st.permutations(range(9)), st.integers(0, _LIST), st.sampled_from(["uint16", "float32"])
)
def test_scatter_then_gather(order: list[int], count: int, dtype: str) -> None:
    ids = order[:_LIST]
    pages = oracle.layers(_LIST, _PAGE, 2, dtype)
    pool = scatter_pages(
        oracle.device(pages), oracle.device(oracle.layers(9, _PAGE, 2, dtype)), ids, count
    )
    gathered = gather_pages(pool, ids, count)
    oracle.assert_equal([rows[:count] for rows in gathered], [rows[:count] for rows in pages])
