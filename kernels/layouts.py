# SPDX-License-Identifier: Apache-2.0
"""Which page layouts a DMA on TPU moves in place, and which layout to use instead of the others.

A pool moves in place when XLA lays its arrays out row by row with nothing between the rows; else
the compiler puts copies of the whole pool around the kernel, and the kernel gains nothing. What
decides is the tile of the last two dimensions; found by compiling for every TPU (`make
kernels-report`), not from a document:

* there are a page dimension and two more, at least;
* the last dimension is a multiple of 128 lanes;
* the second-last is 2 or 4 packed rows, a single one of 32 bits, or a multiple of 8.

Any page whose bytes are a multiple of 1024 values can be seen that way: `page_shape_for` finds
how. Head size and head count are then the business of the code that reads the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LANES = 128
SUBLANES = 8
_ROWS_PER_WORD = {1: 4, 2: 2, 4: 1}  # by bytes per value


def dtype_problem(dtype: np.dtype) -> str | None:
    """Says why the kernels cannot move values of a dtype, and what to hold instead.

    Args:
      dtype: dtype of the pool.

    Returns:
      None when they can, else the middle of an error message.
    """
    dtype = np.dtype(dtype)
    if dtype == np.float16:
        return "Mosaic for TPU knows no float16; hold the pool's bits as uint16"
    if dtype.itemsize not in _ROWS_PER_WORD or dtype.name.startswith(("int4", "uint4", "float4")):
        return f"Mosaic for TPU does not move {dtype.name}; view the pool as 1, 2 or 4 byte values"
    return None


def _rows_per_word(dtype: np.dtype) -> int:
    """Returns how many rows share a 32-bit register row: 1, 2 or 4 for 32, 16 or 8 bits."""
    return _ROWS_PER_WORD[np.dtype(dtype).itemsize]


def _rows_fit(rows: int, packing: int) -> bool:
    """Says whether this second-last dimension leaves the rows in order without padding."""
    return rows % SUBLANES == 0 or (rows in (1, 2, 4) and rows >= packing)


def moves_in_place(shape: Sequence[int], dtype: np.dtype) -> bool:
    """Says whether the kernels move pages of this pool without a hidden copy.

    Args:
      shape: shape of one device's part of the pool, [pages, ..., rows, lanes].
      dtype: its dtype, of 1, 2 or 4 bytes.

    Returns:
      True when it does on v4, v5e, v5p, v6e and tpu7x.
    """
    packing = _rows_per_word(dtype)
    return len(shape) >= 3 and shape[-1] % LANES == 0 and _rows_fit(shape[-2], packing)


def page_shape_for(values: int, dtype: np.dtype) -> tuple[int, int] | None:
    """Finds a page shape that moves in place and holds exactly this many values.

    Args:
      values: values in one page of one layer on one device.
      dtype: dtype of the pool.

    Returns:
      (rows, lanes) with the fewest lanes, or None when no shape holds them without padding.
    """
    packing = _rows_per_word(dtype)
    if values <= 0 or values % LANES:
        return None
    words = values // LANES
    # Rows in multiples of 8 first: that leaves the lanes as few as possible.
    for rows_max in (words // SUBLANES * SUBLANES, 4, 2, 1):
        for rows in range(rows_max, 0, -SUBLANES):
            if words % rows == 0 and _rows_fit(rows, packing):
                return rows, values // rows
    return None


def layout_problem(shape: Sequence[int], dtype: np.dtype) -> str | None:
    """Says why a pool cannot be moved in place on TPU, and which layout could.

    Args:
      shape: shape of one device's part of the pool, [pages, ...].
      dtype: its dtype.

    Returns:
      None when the pool moves in place, else the middle of an error message.
    """
    unknown = dtype_problem(dtype)
    if unknown is not None:
        return unknown
    if moves_in_place(shape, dtype):
        return None
    values = math.prod(shape[1:])
    better = page_shape_for(values, dtype)
    if better is not None:
        rows, lanes = better
        advice = f"hold the pool as [{shape[0]}, {rows}, {lanes}]: the same values in order"
    else:
        unit = LANES * _rows_per_word(dtype)
        advice = (
            f"pad each page from {values} to {-(-values // unit) * unit} values and hold the pool "
            f"as [{shape[0]}, {_rows_per_word(dtype)}, "
            f"{-(-values // unit) * LANES}]"
        )
    return (
        f"pages of {np.dtype(dtype)}{list(shape[1:])} (per device) cannot move in place on TPU, "
        f"only with copies of the whole pool around the kernel; {advice}"
    )


def view_problem(shape: Sequence[int], view: Sequence[int], dtype: np.dtype) -> str | None:
    """Says why pages cannot be cut into smaller ones without moving bytes on TPU.

    Args:
      shape: shape of one device's part of the pool, [pages, rows, ...].
      view: its shape with every page cut into pages of fewer rows, [more pages, fewer rows, ...].
      dtype: its dtype.

    Returns:
      None when the view is free, else the middle of an error message.
    """
    if tuple(shape) == tuple(view) or len(shape) > 3:
        return None
    tile = _tile_rows(shape[1], dtype)
    if view[1] % tile == 0 and _tile_rows(view[1], dtype) == tile:
        return None
    return (
        f"pages of {np.dtype(dtype)}{list(shape[1:])} (per device) cannot be cut into pages of "
        f"{list(view[1:])} in place on TPU; the smaller page needs a multiple of {tile} rows"
    )


def _tile_rows(rows: int, dtype: np.dtype) -> int:
    """Returns how many rows XLA puts into one tile: 8, or 32 of 8 bits when they fill it."""
    packed = SUBLANES * _rows_per_word(dtype)
    if packed == 4 * SUBLANES and rows % packed == 0:
        return packed
    return min(rows, SUBLANES)
