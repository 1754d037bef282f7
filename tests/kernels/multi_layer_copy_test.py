# SPDX-License-Identifier: Apache-2.0
"""multi_layer_copy, scatter_pages and gather_pages: what they do, on both implementations."""

from __future__ import annotations

import functools
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels.multi_layer_copy import (
    gather_pages,
    multi_layer_copy,
    scatter_pages,
)
from kvferry.kernels.multi_layer_copy.plan import run_copy
from kvferry.kernels.multi_layer_copy.reference import copy_layers, gather_layers
from kvferry.tests.kernels import oracle
from kvferry.tests.kernels.oracle import Run
from kvferry.tests.kernels.simulator import PARAMS, params_id, watched

_DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_PAGE = (4, 128)

_XLA: dict[str, Any] = {"implementation": "xla"}
_SIMULATED: dict[str, Any] = {
    "implementation": "mosaic_tpu",
    "interpret": pltpu.InterpretParams(dma_execution_mode="on_wait"),
}
both = pytest.mark.parametrize("how", [_XLA, _SIMULATED], ids=["xla", "mosaic_tpu"])


def _check(
    src: oracle.Arrays, dest: oracle.Arrays, runs: list[Run], how: dict[str, Any], **more: Any
) -> None:
    """Runs the copy with poison after the valid runs and compares every page of every layer."""
    poison = [Run(0, 0, 1), Run(500, 500, 500)]
    results = multi_layer_copy(
        src_array=oracle.device(src),
        dest_array=oracle.device(dest),
        **oracle.split(runs + poison),
        num_chunks=len(runs),
        **how,
        **more,
    )
    oracle.assert_equal(results, oracle.copied(src, dest, runs))


@both
@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_dtype(dtype: str, how: dict[str, Any]) -> None:
    src = oracle.layers(6, _PAGE, 2, dtype)
    dest = oracle.layers(9, _PAGE, 2, dtype, seed=1)
    _check(src, dest, [Run(4, 7, 2), Run(0, 2, 3)], how)


@both
@pytest.mark.parametrize(
    "page",
    [(16, 2, 64), (16, 6, 80), (5, 3), (96,), (), (4, 8, 2, 128), (7, 192)],
    ids=str,
)
def test_every_page_shape(page: tuple[int, ...], how: dict[str, Any]) -> None:
    src = oracle.layers(4, page, 2)
    dest = oracle.layers(6, page, 2, seed=1)
    _check(src, dest, [Run(3, 0), Run(0, 3, 3)], how)


@both
@pytest.mark.parametrize(
    ("src_pages", "dest_pages", "runs"),
    [
        pytest.param(4, 40, [Run(i, 7 * i + 3) for i in range(4)], id="scatter"),
        pytest.param(4, 40, [Run(2, 39)], id="scatter_few"),
        pytest.param(40, 4, [Run(7 * i + 3, i) for i in range(4)], id="gather"),
        pytest.param(40, 4, [Run(9, 3)], id="gather_few"),
        pytest.param(40, 4, [Run(9, 0), Run(9, 1), Run(9, 2)], id="gather_repeats"),
        pytest.param(4, 40, [Run(1, 9), Run(1, 10), Run(1, 20)], id="scatter_repeats"),
        pytest.param(4, 40, [Run(0, 9, 3), Run(2, 20, 2)], id="sources_overlap"),
        pytest.param(20, 20, [Run(i, 19 - i) for i in range(20)], id="paged_all"),
        pytest.param(20, 20, [Run(5, 5, 3), Run(0, 10, 2)], id="paged_few"),
        pytest.param(20, 18, [Run(0, 0, 18)], id="one_long_run"),
        pytest.param(8, 8, [], id="nothing"),
    ],
)
def test_every_form(src_pages: int, dest_pages: int, runs: list[Run], how: dict[str, Any]) -> None:
    src = oracle.layers(src_pages, _PAGE, 3)
    dest = oracle.layers(dest_pages, _PAGE, 3, seed=1)
    _check(src, dest, runs, how)


@pytest.mark.parametrize(
    ("src_pages", "dest_pages", "runs"),
    [(4, 40, [Run(1, 9, 2), Run(1, 30)]), (40, 4, [Run(20, 0, 3)]), (8, 8, [])],
)
def test_form_for_tpu(src_pages: int, dest_pages: int, runs: list[Run]) -> None:
    """The form of the XLA reference that a TPU gets is right on CPU as well."""
    src, dest = oracle.layers(src_pages, _PAGE, 2), oracle.layers(dest_pages, _PAGE, 2, seed=1)
    chunks = oracle.chunks([*runs, Run(99, 99, 99)], len(runs))
    results = copy_layers(oracle.device(src), oracle.device(dest), chunks, form="page_loop")
    oracle.assert_equal(results, oracle.copied(src, dest, runs))


@both
def test_layers_may_differ(how: dict[str, Any]) -> None:
    """As in a hybrid model: attention, an MLA latent, and a small state."""
    shapes = [((16, 2, 128), "bfloat16"), ((4, 640), "float32"), ((3,), "int8"), ((4, 640), "int8")]
    src, dest = [], []
    for seed, (page, dtype) in enumerate(shapes):
        src += oracle.layers(5 + seed % 2, page, 1, dtype, seed=seed)
        dest += oracle.layers(9 + seed, page, 1, dtype, seed=seed + 10)
    _check(src, dest, [Run(4, 0), Run(0, 3, 3)], how)


@pytest.mark.parametrize("params", PARAMS, ids=params_id)
@pytest.mark.parametrize("window", [1, 3, 50])
def test_every_window(window: int, params: pltpu.InterpretParams) -> None:
    src, dest = oracle.layers(3, _PAGE, 4), oracle.layers(7, _PAGE, 4, seed=1)
    with watched(params):
        results = multi_layer_copy(
            src_array=oracle.device(src),
            dest_array=oracle.device(dest),
            **oracle.split([Run(0, 4), Run(1, 1, 2)]),
            interpret=params,
            window=window,
        )
        jax.block_until_ready(results)
    oracle.assert_equal(results, oracle.copied(src, dest, [Run(0, 4), Run(1, 1, 2)]))


@both
@pytest.mark.parametrize("num_chunks", [2, np.int64(2), np.array([2]), [2], None], ids=repr)
def test_every_way_to_count(num_chunks: Any, how: dict[str, Any]) -> None:
    src, dest = oracle.layers(3, _PAGE, 1), oracle.layers(5, _PAGE, 1, seed=1)
    runs = [Run(0, 4), Run(1, 1, 2)]
    listed = runs if num_chunks is None else [*runs, Run(9, 9)]
    results = multi_layer_copy(
        src_array=oracle.device(src),
        dest_array=oracle.device(dest),
        **oracle.split(listed),
        num_chunks=num_chunks,
        **how,
    )
    oracle.assert_equal(results, oracle.copied(src, dest, runs))


@both
def test_lists_of_any_integers(how: dict[str, Any]) -> None:
    src, dest = oracle.layers(3, _PAGE, 1), oracle.layers(5, _PAGE, 1, seed=1)
    results = multi_layer_copy(
        src_array=oracle.device(src),
        dest_array=tuple(oracle.device(dest)),
        src_offsets=[0, 2],
        dest_offsets=jnp.array([3, 1], jnp.int16),
        chunk_sizes=np.array([2, 1], np.int64),
        **how,
    )
    oracle.assert_equal(results, oracle.copied(src, dest, [Run(0, 3, 2), Run(2, 1)]))


@both
@pytest.mark.parametrize("page", [(4, 128), (4, 6, 64), (3,)], ids=str)
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_scatter_and_gather_pages(page: tuple[int, ...], dtype: str, how: dict[str, Any]) -> None:
    pages, pool = oracle.layers(5, page, 3, dtype), oracle.layers(12, page, 3, dtype, seed=1)
    ids = [7, 3, 11, 0, 99]
    scattered = scatter_pages(oracle.device(pages), oracle.device(pool), ids, 4, **how)
    expected = oracle.copied(pages, pool, [Run(row, ids[row]) for row in range(4)])
    oracle.assert_equal(scattered, expected)
    gathered = gather_pages(scattered, ids, 4, **how)
    oracle.assert_equal([rows[:4] for rows in gathered], [rows[:4] for rows in pages])
    assert [rows.shape for rows in gathered] == [(5, *page)] * 3
    oracle.assert_equal(scattered, expected)  # a gather donates nothing


def test_fresh_gather_for_tpu() -> None:
    pool = oracle.layers(12, _PAGE, 2)
    ids, count = jnp.array([7, 3, 99], jnp.int32), jnp.array([2], jnp.int32)
    gathered = gather_layers(oracle.device(pool), ids, count, form="page_loop")
    oracle.assert_equal([rows[:2] for rows in gathered], [array[[7, 3]] for array in pool])


@both
@pytest.mark.parametrize(
    ("page", "dtype"),
    [((4, 128), "float32"), ((4, 64), "uint16"), ((4, 64), "bfloat16")],
    ids=str,
)
def test_gather_may_repeat_pages(page: tuple[int, ...], dtype: str, how: dict[str, Any]) -> None:
    pool = oracle.layers(4, page, 2, dtype)
    gathered = gather_pages(oracle.device(pool), [3, 3, 0], **how)
    oracle.assert_equal(gathered, [array[[3, 3, 0]] for array in pool])


@both
def test_inside_a_jit(how: dict[str, Any]) -> None:
    """With everything traced, and the donation left to the outer function."""
    pages, pool = oracle.layers(4, _PAGE, 2), oracle.layers(9, _PAGE, 2, seed=1)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(pages: Any, pool: Any, ids: Any, count: Any) -> Any:
        pool = scatter_pages(pages, pool, ids, count, **how)
        return pool, gather_pages(pool, ids + 0, count, **how)

    ids = jnp.array([5, 1, 8, 77], jnp.int32)
    scattered, gathered = step(oracle.device(pages), oracle.device(pool), ids, jnp.int32(3))
    runs = [Run(0, 5), Run(1, 1), Run(2, 8)]
    oracle.assert_equal(scattered, oracle.copied(pages, pool, runs))
    oracle.assert_equal([rows[:3] for rows in gathered], [rows[:3] for rows in pages])


@both
def test_new_values_do_not_recompile(how: dict[str, Any]) -> None:
    src, dest = oracle.layers(6, _PAGE, 2), oracle.layers(9, _PAGE, 2, seed=1)
    lists = [
        ([Run(0, 1), Run(1, 2), Run(2, 3)], 3),
        ([Run(0, 1, 5), Run(5, 8), Run(2, 0)], 3),
        ([Run(3, 3, 2), Run(0, 0), Run(0, 0)], 1),
        ([Run(0, 7), Run(0, 8), Run(0, 0)], 2),
        ([Run(0, 0)] * 3, 0),
    ]
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=1)
    @chex.assert_max_traces(n=1)
    def copy(src: Any, dest: Any, listed: Any, count: Any) -> Any:
        return multi_layer_copy(src_array=src, dest_array=dest, **listed, num_chunks=count, **how)

    for runs, count in lists:
        results = copy(oracle.device(src), oracle.device(dest), oracle.split(runs), count)
        oracle.assert_equal(results, oracle.copied(src, dest, runs[:count]))
    # The same without a jit around it.
    compiled = set[int]()
    for runs, count in lists:
        results = multi_layer_copy(
            src_array=oracle.device(src),
            dest_array=oracle.device(dest),
            **oracle.split(runs),
            num_chunks=count,
            **how,
        )
        oracle.assert_equal(results, oracle.copied(src, dest, runs[:count]))
        compiled.add(cast(Any, run_copy)._cache_size())
    assert len(compiled) == 1


@pytest.mark.parametrize("dtype", ["float32", "uint16", "uint8"])
def test_destination_stays_where_it_is(dtype: str) -> None:
    """On CPU: the returned arrays are the donated memory, and the donated arrays are gone."""
    pages, pool = oracle.layers(4, _PAGE, 2, dtype), oracle.layers(9, _PAGE, 2, dtype, seed=1)
    arrays = oracle.device(pool)
    before = [array.unsafe_buffer_pointer() for array in arrays]
    results = scatter_pages(oracle.device(pages), arrays, [1, 5, 2, 8])
    assert [array.unsafe_buffer_pointer() for array in results] == before
    assert all(array.is_deleted() for array in arrays)


def test_returns_before_the_copy_is_done() -> None:
    """Readiness is asked of the arrays: nothing in the call waits."""
    pools = oracle.device(oracle.layers(64, (16, 128), 8))
    results: list[Any] = gather_pages(pools, list(range(64)))
    jax.block_until_ready(results)
    assert all(array.is_ready() for array in results)


def test_best_implementation_on_cpu_is_xla() -> None:
    src, dest = oracle.layers(3, _PAGE, 1), oracle.layers(5, _PAGE, 1, seed=1)
    _check(src, dest, [Run(0, 3)], {})


def test_interpret_true_simulates_the_kernel() -> None:
    src, dest = oracle.layers(3, _PAGE, 1), oracle.layers(5, _PAGE, 1, seed=1)
    _check(src, dest, [Run(0, 3, 2)], {"interpret": True})


@both
def test_trusting_the_caller(how: dict[str, Any]) -> None:
    src, dest = oracle.layers(3, _PAGE, 1), oracle.layers(5, _PAGE, 1, seed=1)
    _check(src, dest, [Run(0, 3, 2)], how, checks="none")
