# SPDX-License-Identifier: Apache-2.0
"""Which layouts are said to move in place on TPU, and what is said about the others."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.kernels import layouts


def _dtype(name: str) -> np.dtype:
    return np.dtype(jnp.dtype(name))


@pytest.mark.parametrize(
    ("page", "dtype", "expected"),
    [
        ((16, 16, 128), "bfloat16", True),
        ((16, 2, 128), "bfloat16", True),
        ((16, 1, 128), "bfloat16", False),
        ((16, 1, 128), "float32", True),
        ((16, 3, 128), "float32", False),
        ((16, 12, 128), "float32", False),
        ((16, 24, 128), "int8", True),
        ((16, 2, 128), "int8", False),
        ((16, 4, 128), "int8", True),
        ((64, 8, 2, 64), "bfloat16", False),
        ((64, 576), "bfloat16", False),
        ((64, 640), "float8_e4m3fn", True),
        ((128,), "float32", False),
    ],
)
def test_moves_in_place(page: tuple[int, ...], dtype: str, expected: bool) -> None:
    assert layouts.moves_in_place((1024, *page), _dtype(dtype)) is expected
    assert (layouts.layout_problem((1024, *page), _dtype(dtype)) is None) is expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("heads", [1, 3, 8, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 576])
def test_every_head_count_and_size_has_a_shape(heads: int, head_dim: int, dtype: str) -> None:
    values = 16 * 2 * heads * head_dim
    page = layouts.page_shape_for(values, _dtype(dtype))
    assert page is not None
    assert math.prod(page) == values
    assert layouts.moves_in_place((1024, *page), _dtype(dtype))


def test_page_shape_has_as_few_lanes_as_possible() -> None:
    assert layouts.page_shape_for(16 * 6 * 128, _dtype("bfloat16")) == (96, 128)
    assert layouts.page_shape_for(16 * 160, _dtype("bfloat16")) == (4, 640)
    assert layouts.page_shape_for(128, _dtype("float32")) == (1, 128)


@pytest.mark.parametrize("values", [0, 100, 128])
def test_no_page_shape_without_padding(values: int) -> None:
    assert layouts.page_shape_for(values, _dtype("bfloat16")) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "advice"),
    [
        ((9, 64, 8, 2, 64), "bfloat16", r"hold the pool as \[9, 512, 128\]: the same values"),
        ((9, 64, 576), "bfloat16", r"hold the pool as \[9, 288, 128\]: the same values"),
        ((9, 5, 20), "bfloat16", r"pad each page from 100 to 256 values and .* as \[9, 2, 128\]"),
        ((9, 3), "int8", r"pad each page from 3 to 512 values and .* as \[9, 4, 128\]"),
        ((9, 16, 128), "float16", "hold the pool's bits as uint16"),
        ((9, 16, 128), "float64", "does not move float64"),
        ((9, 16, 128), "int4", "does not move int4"),
    ],
)
def test_problem_says_which_layout_would_do(
    shape: tuple[int, ...], dtype: str, advice: str
) -> None:
    problem = layouts.layout_problem(shape, _dtype(dtype))
    assert problem is not None
    with pytest.raises(NotImplementedError, match=advice):
        raise NotImplementedError(problem)


@pytest.mark.parametrize(
    ("shape", "view", "free"),
    [
        ((9, 64, 8, 2, 128), (36, 16, 8, 2, 128), True),
        ((9, 96, 128), (18, 48, 128), True),
        ((9, 96, 128), (9, 96, 128), True),
        ((9, 8, 128), (18, 4, 128), False),
        ((9, 24, 128), (18, 12, 128), False),
    ],
)
def test_cutting_pages(shape: tuple[int, ...], view: tuple[int, ...], free: bool) -> None:
    problem = layouts.view_problem(shape, view, _dtype("bfloat16"))
    assert (problem is None) is free
    if problem is not None:
        assert "needs a multiple of 8 rows" in problem
