# SPDX-License-Identifier: Apache-2.0
"""The list of page runs that one copy moves, and its checks on host and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Status of one chunk, as `checks="device"` reports it.
CHUNK_OK = 0
CHUNK_BAD_SIZE = 1
CHUNK_BAD_SRC = 2
CHUNK_BAD_DEST = 3
CHUNK_OVERLAP = 4
CHUNK_UNUSED = -1


# A numpy array on the host, a jax array or a tracer.
IntArray = Any


class Chunks(NamedTuple):
    """Runs of pages to copy, on the host or the device; entries from `num_chunks` on are ignored.

    Attributes:
      src_offsets: first source page of each run, [n] int32.
      dest_offsets: first destination page of each run, [n] int32.
      sizes: pages in each run, [n] int32.
      num_chunks: how many runs are valid, [1] int32.
    """

    src_offsets: IntArray
    dest_offsets: IntArray
    sizes: IntArray
    num_chunks: IntArray


def _as_int32(name: str, value: object, is_list: bool) -> jax.Array | np.ndarray:
    """Returns `value` as a 1-D int32 array; a jax array is left where it is."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not is_list and array.ndim == 0:
        array = array.reshape(1)
    if array.ndim != 1 or (not is_list and array.shape != (1,)):
        expected = "1-D" if is_list else "a scalar or of shape (1,)"
        raise ValueError(f"{name} must be {expected}, got shape {array.shape}.")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, got dtype {array.dtype}.")
    if array.dtype == np.int32:
        return array
    if isinstance(array, np.ndarray):
        limits = np.iinfo(np.int32)
        outside = (array < limits.min) | (array > limits.max)
        if outside.any():
            index = int(np.argmax(outside))
            raise ValueError(f"{name}[{index}] = {array[index]} does not fit int32.")
    return array.astype(np.int32)


def make_chunks(
    src_offsets: object, dest_offsets: object, chunk_sizes: object, num_chunks: object | None
) -> Chunks:
    """Normalises the arguments of a caller to int32 arrays of agreeing lengths.

    Args:
      src_offsets: [n] integers; numpy, jax array, tracer or a sequence.
      dest_offsets: [n] integers.
      chunk_sizes: [n] integers.
      num_chunks: None (all n), an int, or an array of shape () or (1,).

    Returns:
      The chunk list. Host values stay on the host.

    Raises:
      ValueError: a rank, length or dtype is wrong, or a value does not fit int32.
    """
    src = _as_int32("src_offsets", src_offsets, is_list=True)
    dest = _as_int32("dest_offsets", dest_offsets, is_list=True)
    sizes = _as_int32("chunk_sizes", chunk_sizes, is_list=True)
    for name, array in (("dest_offsets", dest), ("chunk_sizes", sizes)):
        if array.shape != src.shape:
            raise ValueError(
                f"{name} has {array.shape[0]} entries, src_offsets has {src.shape[0]}; "
                "they must be equally long."
            )
    if src.shape[0] == 0:
        raise ValueError("The chunk list is empty: pass at least one entry (num_chunks may be 0).")
    count = src.shape[0] if num_chunks is None else num_chunks
    return Chunks(src, dest, sizes, _as_int32("num_chunks", count, is_list=False))


def as_page_ids(page_ids: object) -> jax.Array | np.ndarray:
    """Normalises a list of pages.

    Args:
      page_ids: [n] integers; numpy, jax array, tracer or a sequence.

    Returns:
      The same as int32. Host values stay on the host.

    Raises:
      ValueError: it is not 1-D, holds no integers, or a value does not fit int32.
    """
    return _as_int32("page_ids", page_ids, is_list=True)


def host_chunks(chunks: Chunks) -> Chunks | None:
    """Returns the chunk list as numpy arrays, or None when a part cannot be read here and now."""
    parts = []
    for array in chunks:
        if isinstance(array, jax.core.Tracer):
            return None
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return None
        parts.append(np.asarray(array))
    return Chunks(*parts)


def _raise_at(bad: np.ndarray, message: str, *columns: np.ndarray) -> None:
    """Raises ValueError for the first true entry of `bad`, formatting index and columns."""
    if bad.any():
        index = int(np.argmax(bad))
        raise ValueError(message.format(index, *(int(column[index]) for column in columns)))


def check_chunks(
    chunks: Chunks,
    src_pages: Sequence[int],
    dest_pages: Sequence[int],
    *,
    distinct_dest: bool = True,
    src_name: str = "src_offsets",
    dest_name: str = "dest_offsets",
) -> None:
    """Checks concrete chunks against the pools of every layer.

    Args:
      chunks: the list, as numpy arrays.
      src_pages: leading dimension of each layer's source.
      dest_pages: leading dimension of each layer's destination.
      distinct_dest: refuse two runs that write the same destination page.
      src_name: the caller's name for the source offsets.
      dest_name: the caller's name for the destination offsets.

    Raises:
      ValueError: `num_chunks` is negative or beyond the list, a size is below 1, a run leaves its
        pool, or two runs write the same page (their DMAs would race).
    """
    length = chunks.src_offsets.shape[0]
    count = int(chunks.num_chunks[0])
    if not 0 <= count <= length:
        raise ValueError(f"num_chunks = {count} is not within 0..{length}, the list's length.")
    src = chunks.src_offsets[:count].astype(np.int64)
    dest = chunks.dest_offsets[:count].astype(np.int64)
    sizes = chunks.sizes[:count].astype(np.int64)
    _raise_at(sizes < 1, "chunk_sizes[{}] = {} must be at least 1.", sizes)
    for name, offsets, pages in (
        (src_name, src, src_pages),
        (dest_name, dest, dest_pages),
    ):
        layer = int(np.argmin(np.asarray(pages)))
        limit = pages[layer]
        _raise_at(offsets < 0, name + "[{}] = {} is negative.", offsets)
        _raise_at(
            offsets + sizes > limit,
            f"{name}[{{0}}] = {{1}} with chunk size {{2}} ends at page {{3}}, but layer {layer} "
            f"has {limit} pages.",
            offsets,
            sizes,
            offsets + sizes,
        )
    if distinct_dest and count > 1:
        order = np.argsort(dest, kind="stable")
        ends = (dest + sizes)[order]
        overlap = ends[:-1] > dest[order][1:]
        if overlap.any():
            at = int(np.argmax(overlap))
            first, second = int(order[at]), int(order[at + 1])
            raise ValueError(
                f"Destinations overlap: chunk {first} writes pages {dest[first]}.."
                f"{dest[first] + sizes[first] - 1} and chunk {second} writes pages "
                f"{dest[second]}..{dest[second] + sizes[second] - 1}."
            )


def guard_chunks(
    chunks: Chunks, src_pages: Sequence[int], dest_pages: Sequence[int]
) -> tuple[Chunks, jax.Array]:
    """Turns chunks that must not run into chunks of size 0, on the device.

    Args:
      chunks: the list; any part may be traced.
      src_pages: leading dimension of each layer's source.
      dest_pages: leading dimension of each layer's destination.

    Returns:
      The list with the size of every refused chunk set to 0, and the status of each chunk, [n]
      int32: `CHUNK_UNUSED` at and beyond `num_chunks`, else `CHUNK_OK` or the first of
      `CHUNK_BAD_SIZE`, `CHUNK_BAD_SRC`, `CHUNK_BAD_DEST`, `CHUNK_OVERLAP` (with an earlier chunk
      that is not itself refused for its range) that applies.
    """
    src, dest, sizes, count = (jnp.asarray(array) for array in chunks)
    index = jnp.arange(src.shape[0], dtype=jnp.int32)
    used = index < count[0]

    def outside(offsets: jax.Array, limit: int) -> jax.Array:
        # Written without offset + size, which could overflow int32.
        return (offsets < 0) | (offsets > limit) | (sizes > limit - offsets)

    bad_size = sizes < 1
    bad_src = outside(src, min(src_pages))
    bad_dest = outside(dest, min(dest_pages))
    candidate = used & ~(bad_size | bad_src | bad_dest)
    # Sizes of refused chunks are replaced first: their sums could overflow.
    start = jnp.where(candidate, dest, 0)
    end = jnp.where(candidate, dest + jnp.where(candidate, sizes, 0), 0)
    meets = (start[:, None] < end[None, :]) & (start[None, :] < end[:, None])
    earlier = index[None, :] < index[:, None]
    overlap = candidate & jnp.any(meets & earlier, axis=1)
    status = jnp.select(
        [~used, bad_size, bad_src, bad_dest, overlap],
        [
            jnp.int32(code)
            for code in (CHUNK_UNUSED, CHUNK_BAD_SIZE, CHUNK_BAD_SRC, CHUNK_BAD_DEST, CHUNK_OVERLAP)
        ],
        jnp.int32(CHUNK_OK),
    )
    kept = jnp.where(status == CHUNK_OK, sizes, 0)
    return Chunks(src, dest, kept, count), status
