# SPDX-License-Identifier: Apache-2.0
"""What the copies cost on CPU, told by the compiler rather than by a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.kernels.copy_to_host import copy_to_device, gather_to_host
from kvferry.kernels.multi_layer_copy import multi_layer_copy, scatter_pages

_LAYERS, _PAGES = 3, 64


def _scatter(src: Any, dest: Any, ids: Any) -> Any:
    return scatter_pages(src, dest, ids)


def _gather(src: Any, dest: Any, ids: Any) -> Any:
    rows, ones = np.arange(_PAGES), np.ones(_PAGES, np.int32)
    return multi_layer_copy(
        src_array=src, dest_array=dest, src_offsets=ids, dest_offsets=rows, chunk_sizes=ones
    )


def _to_host(src: Any, dest: Any, ids: Any) -> Any:
    return gather_to_host(src, dest, ids)


def _to_device(src: Any, dest: Any, ids: Any) -> Any:
    return copy_to_device(src, dest, ids)


def _memory(
    function: Callable[..., Any], pool_pages: int, page: tuple[int, ...], dtype: str
) -> Any:
    pool = [jax.ShapeDtypeStruct((pool_pages, *page), jnp.dtype(dtype))] * _LAYERS
    some = [jax.ShapeDtypeStruct((_PAGES, *page), jnp.dtype(dtype))] * _LAYERS
    src, dest = (pool, some) if function in (_gather, _to_host) else (some, pool)
    ids = jax.ShapeDtypeStruct((_PAGES,), jnp.int32)
    compiled = jax.jit(function, donate_argnums=1).lower(src, dest, ids).compile()
    return compiled.memory_analysis()


@pytest.mark.parametrize(
    ("page", "dtype"),
    [((16, 6, 64), "uint16"), ((16, 2, 128), "uint8"), ((16, 6, 64), "float32")],
    ids=str,
)
@pytest.mark.parametrize("function", [_scatter, _gather, _to_host, _to_device])
def test_in_place_whatever_the_size_of_the_pool(
    function: Callable[..., Any], page: tuple[int, ...], dtype: str
) -> None:
    """No temporary but index arrays, so the cost does not grow with the pool."""
    small, large = (_memory(function, pages, page, dtype) for pages in (256, 2560))
    page_bytes = int(np.prod(page)) * np.dtype(dtype).itemsize
    for memory, pages in ((small, 256), (large, 2560)):
        dest_pages = _PAGES if function in (_gather, _to_host) else pages
        assert memory.alias_size_in_bytes == _LAYERS * dest_pages * page_bytes
        # Some index per page of the larger side, and loop counters: not one page of one layer each.
        assert memory.temp_size_in_bytes < 64 * pages + 256 * _LAYERS < _LAYERS * page_bytes * pages
