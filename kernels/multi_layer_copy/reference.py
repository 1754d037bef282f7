# SPDX-License-Identifier: Apache-2.0
"""The copy in plain XLA: the oracle of the kernel's tests and the path without a TPU.

Three forms of the same copy differ by an order of magnitude on CPU, so the form is chosen there
from the shapes, and where the shapes do not decide, from the chunk list itself, at run time:

* scatter form: one `scatter` with a destination page per source page. In place and as fast as a
  memcpy, but every source page can go to one place only, and each costs some nanoseconds even when
  it goes nowhere.
* gather form: one `gather` with a source page per destination page, rows that no chunk writes
  keep their value. In place; costs a copy of the whole destination, and is slow for short rows.
* page loop: one `dynamic_update_slice` per page. Takes anything, and is half as fast.

On TPU only the page loop leaves every pool in place, whatever its layout; the others make XLA copy
it. Nothing here depends on the values of the chunk list at trace time: new offsets never retrace.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvferry.kernels.chunks import Chunks
from kvferry.kernels.dispatch import Form, is_emulated_float

# A page id that every pool drops: beyond the end of any array that int32 offsets can address.
_NOWHERE = 2**31 - 1

# The scatter form visits every source page; with fewer than one used in this many, the page loop
# is faster.
_MIN_SHARE_FOR_SCATTER = 64

# The gather form rewrites the destination; allowed when the chunk list is at least this share of
# it, as when the list names a page for (nearly) every destination page.
_MIN_SHARE_FOR_GATHER = 2

# XLA's gather moves rows of fewer values than this, of fewer than 4 bytes each, at half the speed.
_WIDE_ROW = 128

_BITS = {1: jnp.uint8, 2: jnp.uint16}


def _to_bits(array: jax.Array) -> jax.Array:
    """Reinterprets floats that XLA's CPU compiler would convert to float32 and back as integers."""
    if is_emulated_float(array.dtype):
        return jax.lax.bitcast_convert_type(array, _BITS[array.dtype.itemsize])
    return array


def _page_map(
    starts: jax.Array, targets: jax.Array, sizes: jax.Array, num_pages: int
) -> tuple[jax.Array, jax.Array]:
    """Inverts runs: for each of `num_pages` pages, where it goes, and how many runs hold it.

    Args:
      starts: first page of each run on the side that is mapped, [n] int32.
      targets: first page of each run on the other side, [n] int32.
      sizes: length of each run, 0 where it must be ignored, [n] int32.
      num_pages: pages on the mapped side.

    Returns:
      The page on the other side for each page, `_NOWHERE` if there is none or more than one, and
      the number of runs that cover each page, both [num_pages] int32.
    """
    used = sizes > 0
    begin = jnp.where(used, starts, num_pages + 1)
    end = jnp.where(used, starts + sizes, num_pages + 1)

    def spread(values: jax.Array) -> jax.Array:
        # A run adds its value at its first page and takes it away after its last; the running
        # sum is then the sum over the runs that cover a page.
        steps = jnp.zeros(num_pages + 1, jnp.int32)
        steps = steps.at[begin].add(values, mode="drop").at[end].add(-values, mode="drop")
        return jnp.cumsum(steps)[:num_pages]

    cover = spread(used.astype(jnp.int32))
    shift = spread(targets - starts)
    pages = jnp.arange(num_pages, dtype=jnp.int32) + shift
    return jnp.where(cover == 1, pages, _NOWHERE), cover


def _scatter_form(src: jax.Array, dest: jax.Array, dest_page_of: jax.Array) -> jax.Array:
    """Writes each source page to its destination page; [n, ...] into [N, ...]."""
    return dest.at[dest_page_of].set(src, mode="drop", unique_indices=True)


def _gather_form(src: jax.Array, dest: jax.Array, src_page_of: jax.Array) -> jax.Array:
    """Reads each destination page from its source page; [N, ...] into [n, ...]."""
    keep = src_page_of == _NOWHERE
    pages = src.at[jnp.where(keep, 0, src_page_of)].get(mode="promise_in_bounds")
    return jnp.where(keep.reshape((-1,) + (1,) * (dest.ndim - 1)), dest, pages)


def cut_pages(array: jax.Array, split: int) -> jax.Array:
    """Views a pool with every page cut into equal parts.

    Args:
      array: [pages, rows, ...].
      split: parts of each page.

    Returns:
      [pages * split, rows / split, ...].
    """
    if split == 1:
        return array
    return array.reshape(array.shape[0] * split, array.shape[1] // split, *array.shape[2:])


def _page_start(page: jax.Array, split: int, array: jax.Array) -> list[jax.Array | int]:
    """Returns where a page starts in an array whose own pages hold `split` such pages each."""
    if split == 1:
        return [page] + [0] * (array.ndim - 1)
    return [page // split, page % split * (array.shape[1] // split)] + [0] * (array.ndim - 2)


def _page_loop(
    src: jax.Array, dest: jax.Array, chunks: Chunks, sizes: jax.Array, splits: tuple[int, int]
) -> jax.Array:
    """Copies page by page; the loops carry one layer, or XLA would copy them all each time."""
    page_shape = [1, *src.shape[1:]]
    if splits[0] > 1:
        page_shape[1] //= splits[0]

    def copy_chunk(chunk: jax.Array, dest: jax.Array) -> jax.Array:
        def copy_page(page: jax.Array, dest: jax.Array) -> jax.Array:
            src_start = _page_start(chunks.src_offsets[chunk] + page, splits[0], src)
            dest_start = _page_start(chunks.dest_offsets[chunk] + page, splits[1], dest)
            rows = jax.lax.dynamic_slice(src, src_start, page_shape)
            return jax.lax.dynamic_update_slice(dest, rows, dest_start)

        return jax.lax.fori_loop(0, sizes[chunk], copy_page, dest)

    count = jnp.minimum(chunks.num_chunks[0], sizes.shape[0])
    return jax.lax.fori_loop(0, count, copy_chunk, dest)


def _has_wide_rows(array: jax.Array) -> bool:
    """Says whether XLA's gather moves pages of this array at full speed on CPU."""
    return array.dtype.itemsize >= 4 or (array.ndim > 1 and array.shape[-1] >= _WIDE_ROW)


def _copy_group(
    src: list[jax.Array], dest: list[jax.Array], chunks: Chunks, sizes: jax.Array
) -> list[jax.Array]:
    """Copies layers whose sources, and whose destinations, have equally many pages."""
    src_pages, dest_pages = src[0].shape[0], dest[0].shape[0]
    gathers = dest_pages <= min(src_pages, _MIN_SHARE_FOR_GATHER * sizes.shape[0])
    if gathers and all(_has_wide_rows(array) for array in src):
        src_page_of, _ = _page_map(chunks.dest_offsets, chunks.src_offsets, sizes, dest_pages)
        return [_gather_form(s, d, src_page_of) for s, d in zip(src, dest, strict=True)]
    dest_page_of, cover = _page_map(chunks.src_offsets, chunks.dest_offsets, sizes, src_pages)
    one_target = jnp.max(cover, initial=0) <= 1
    worth_it = _MIN_SHARE_FOR_SCATTER * jnp.sum(cover) >= src_pages
    return list(
        # One conditional around all layers keeps the pools in place; one per layer is slower.
        jax.lax.cond(
            one_target & worth_it,
            lambda: [_scatter_form(s, d, dest_page_of) for s, d in zip(src, dest, strict=True)],
            lambda: [
                _page_loop(s, d, chunks, sizes, (1, 1)) for s, d in zip(src, dest, strict=True)
            ],
        )
    )


def copy_layers(
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    chunks: Chunks,
    *,
    splits: tuple[int, int] = (1, 1),
    form: Form = "fastest",
    as_bits: bool = False,
) -> list[jax.Array]:
    """Copies runs of pages from each source into the destination of the same layer.

    Args:
      src_array: one array per layer, [src_pages, ...].
      dest_array: one array per layer, [dest_pages, ...], same page shape and dtype as its source.
        In place when the caller's jit donates it.
      chunks: the runs; a size of 0 is a run that is skipped.
      splits: pages of the list in each page of the sources, and of the destinations.
      form: "fastest" on CPU, "page_loop" on TPU.
      as_bits: move bfloat16 and float8 as unsigned integers (for XLA's CPU compiler).

    Returns:
      The updated destinations.
    """
    chunks = Chunks(*(jnp.asarray(array) for array in chunks))
    index = jnp.arange(chunks.sizes.shape[0], dtype=jnp.int32)
    sizes = jnp.where(index < chunks.num_chunks[0], chunks.sizes, 0)
    groups: dict[tuple[int, int], list[int]] = {}
    for layer, (src, dest) in enumerate(zip(src_array, dest_array, strict=True)):
        groups.setdefault((src.shape[0], dest.shape[0]), []).append(layer)
    results = list(dest_array)
    for layers in groups.values():
        sources = [src_array[layer] for layer in layers]
        dests = [dest_array[layer] for layer in layers]
        if as_bits:
            sources, dests = [_to_bits(x) for x in sources], [_to_bits(x) for x in dests]
        if form == "page_loop":
            pairs = zip(sources, dests, strict=True)
            group = [_page_loop(source, dest, chunks, sizes, splits) for source, dest in pairs]
        else:
            views = [cut_pages(source, splits[0]) for source in sources]
            group = [cut_pages(dest, splits[1]) for dest in dests]
            group = _copy_group(views, group, chunks, sizes)
        for layer, copied in zip(layers, group, strict=True):
            copied = copied.reshape(dest_array[layer].shape)
            dtype = dest_array[layer].dtype
            if copied.dtype != dtype:
                copied = jax.lax.bitcast_convert_type(copied, dtype)
            results[layer] = copied
    return results


def gather_layers(
    src_array: Sequence[jax.Array],
    page_ids: jax.Array,
    num_pages: jax.Array,
    *,
    form: Form = "fastest",
) -> list[jax.Array]:
    """Copies single pages of each layer into a fresh array.

    Args:
      src_array: one array per layer, [src_pages, ...].
      page_ids: pages wanted, [n] int32.
      num_pages: how many of them are valid, [1] int32.
      form: as in `copy_layers`.

    Returns:
      One [n, ...] array per layer; rows at and beyond `num_pages` are unspecified.
    """
    # What must not be written as it is can still be read as it is.
    if form == "fastest" and all(
        _has_wide_rows(x) or is_emulated_float(x.dtype) for x in src_array
    ):
        return [src.at[page_ids].get(mode="clip") for src in src_array]
    count = page_ids.shape[0]
    rows = jnp.arange(count, dtype=jnp.int32)
    chunks = Chunks(page_ids, rows, jnp.ones(count, jnp.int32), num_pages)
    fresh = [jnp.zeros((count, *src.shape[1:]), src.dtype) for src in src_array]
    return copy_layers(src_array, fresh, chunks, form=form)
