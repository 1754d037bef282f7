# SPDX-License-Identifier: Apache-2.0
"""Copies runs of pages of all layers from one set of arrays into another, in place.

Three public functions share one path: `multi_layer_copy` takes any list of runs and has the
signature of tpu-inference's function of that name, `scatter_pages` and `gather_pages` are its two
everyday forms, between paged pools and contiguous arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from kvferry.kernels.chunks import as_page_ids, check_chunks, host_chunks, make_chunks
from kvferry.kernels.dispatch import Implementation, Interpret
from kvferry.kernels.multi_layer_copy import kernel
from kvferry.kernels.multi_layer_copy.plan import Options, make_plan, run_copy, run_gather
from kvferry.kernels.sharding import Layers, SpecOrSpecs

Checks = Literal["host", "device", "none"]


@overload
def multi_layer_copy(
    *,
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    src_offsets: object,
    dest_offsets: object,
    chunk_sizes: object,
    num_chunks: object | None = ...,
    mesh: Mesh | None = ...,
    src_sharding_spec: SpecOrSpecs | None = ...,
    dest_sharding_spec: SpecOrSpecs | None = ...,
    replicated_sharding_spec: PartitionSpec | None = ...,
    implementation: Implementation | None = ...,
    interpret: Interpret = ...,
    window: int = ...,
    repage: bool = ...,
    checks: Literal["host", "none"] = ...,
) -> list[jax.Array]: ...


@overload
def multi_layer_copy(
    *,
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    src_offsets: object,
    dest_offsets: object,
    chunk_sizes: object,
    num_chunks: object | None = ...,
    mesh: Mesh | None = ...,
    src_sharding_spec: SpecOrSpecs | None = ...,
    dest_sharding_spec: SpecOrSpecs | None = ...,
    replicated_sharding_spec: PartitionSpec | None = ...,
    implementation: Implementation | None = ...,
    interpret: Interpret = ...,
    window: int = ...,
    repage: bool = ...,
    checks: Literal["device"],
) -> tuple[list[jax.Array], jax.Array]: ...


def multi_layer_copy(
    *,
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    src_offsets: object,
    dest_offsets: object,
    chunk_sizes: object,
    num_chunks: object | None = None,
    mesh: Mesh | None = None,
    src_sharding_spec: SpecOrSpecs | None = None,
    dest_sharding_spec: SpecOrSpecs | None = None,
    replicated_sharding_spec: PartitionSpec | None = None,
    implementation: Implementation | None = None,
    interpret: Interpret = False,
    window: int = kernel.DEFAULT_WINDOW,
    repage: bool = False,
    checks: Checks = "host",
) -> list[jax.Array] | tuple[list[jax.Array], jax.Array]:
    """Copies runs of pages from each layer's source into its destination, which is donated.

    For every layer l and every i < num_chunks, in no particular order:
    `dest[l][dest_offsets[i] :][: chunk_sizes[i]] = src[l][src_offsets[i] :][: chunk_sizes[i]]`.
    All other pages of the destination keep their value. Returns as soon as the copy is enqueued.

    Args:
      src_array: one array per layer, [src_pages, ...]. Layers may differ in shape and dtype.
      dest_array: one array per layer, [dest_pages, ...]; pages of the same shape and dtype as the
        source's. Donated: use the returned arrays from then on.
      src_offsets: first source page of each run, [n] integers. Numpy arrays and lists are checked
        without waiting for a device; a jax array on an accelerator has to be fetched first.
      dest_offsets: first destination page of each run, [n] integers.
      chunk_sizes: pages in each run, [n] integers.
      num_chunks: how many entries of the list count, an int or an array of shape () or (1,).
        None: all. Entries beyond are never looked at.
      mesh: mesh of the arrays. None: taken from the arrays when they are concrete.
      src_sharding_spec: partition spec of the sources, one for all layers or one per layer. Any
        axis but the page axis may be sharded. None: taken from the arrays.
      dest_sharding_spec: the same for the destinations.
      replicated_sharding_spec: spec of the chunk list; only the empty spec is possible. Accepted
        for callers of the function this one replaces.
      implementation: "mosaic_tpu" (Pallas), "xla", or None for the best that can run.
      interpret: simulate the Pallas kernel on CPU; True or `pltpu.InterpretParams`.
      window: layers whose DMAs are in flight together (Pallas only).
      repage: page sizes (dimension 1) of source and destination may differ by an integer factor;
        offsets and sizes then count pages of the smaller size, see `small_page_ids`.
      checks: "host" checks a concrete chunk list before anything runs (a traced one cannot be
        checked); "device" also works on traced lists: a chunk that is out of range or overlaps an
        earlier one copies nothing and is reported; "none" trusts the caller.

    Returns:
      The updated destinations; with `checks="device"` also the status of each chunk, [n] int32,
      see `kvferry.kernels.chunks.CHUNK_*`.

    Raises:
      ValueError: layer counts, shapes, dtypes, meshes or specs disagree; the page axis is sharded;
        or (`checks="host"`) an offset is out of range, a size is below 1, num_chunks is not within
        the list, or two runs write the same page.
      NotImplementedError: the implementation asked for cannot run here or cannot move this layout
        in place; the message says which layout it could.
    """
    if checks not in ("host", "device", "none"):
        raise ValueError(f"checks = {checks!r} is unknown; use 'host', 'device' or 'none'.")
    if replicated_sharding_spec is not None and any(replicated_sharding_spec):
        raise ValueError(
            f"replicated_sharding_spec = {replicated_sharding_spec} must not shard anything."
        )
    chunks = make_chunks(src_offsets, dest_offsets, chunk_sizes, num_chunks)
    src = Layers(
        name="src_array",
        arrays=list(src_array),
        spec_name="src_sharding_spec",
        spec=src_sharding_spec,
    )
    dest = Layers(
        name="dest_array",
        arrays=list(dest_array),
        spec_name="dest_sharding_spec",
        spec=dest_sharding_spec,
    )
    options = Options(
        implementation=implementation, interpret=interpret, window=window, repage=repage
    )
    plan = make_plan(src, dest, mesh, options)
    values = host_chunks(chunks) if checks == "host" else None
    if values is not None:
        check_chunks(values, plan.src_pages(src.arrays), plan.dest_pages(dest.arrays))
        chunks = values
    plan = dataclasses.replace(plan, guard=checks == "device")
    copied, status = run_copy(
        src_array=list(src.arrays), dest_array=list(dest.arrays), chunks=chunks, plan=plan
    )
    return copied if status is None else (copied, status)


def scatter_pages(
    pages_array: Sequence[jax.Array],
    pool_array: Sequence[jax.Array],
    page_ids: object,
    num_pages: object | None = None,
    *,
    mesh: Mesh | None = None,
    sharding_spec: SpecOrSpecs | None = None,
    implementation: Implementation | None = None,
    interpret: Interpret = False,
    checks: Literal["host", "none"] = "host",
) -> list[jax.Array]:
    """Writes contiguous pages into the pools: `pool[l][page_ids[i]] = pages[l][i]`.

    Args:
      pages_array: one array per layer, [n, ...].
      pool_array: one array per layer, [num_pages, ...]; donated.
      page_ids: where each page goes, [n] integers; distinct among the valid ones.
      num_pages: how many of the n are valid; None: all. The rest touches nothing.
      mesh: as in `multi_layer_copy`.
      sharding_spec: of pages and pool alike, as in `multi_layer_copy`.
      implementation: as in `multi_layer_copy`.
      interpret: as in `multi_layer_copy`.
      checks: as in `multi_layer_copy`.

    Returns:
      The updated pools.

    Raises:
      ValueError: as in `multi_layer_copy`, or `page_ids` is not as long as the pages arrays.
      NotImplementedError: as in `multi_layer_copy`.
    """
    ids = as_page_ids(page_ids)
    count = ids.shape[0]
    for layer, pages in enumerate(pages_array):
        if pages.shape[0] != count:
            raise ValueError(
                f"pages_array[{layer}] has {pages.shape[0]} pages, page_ids has {count} entries."
            )
    return multi_layer_copy(
        src_array=pages_array,
        dest_array=pool_array,
        src_offsets=np.arange(count, dtype=np.int32),
        dest_offsets=ids,
        chunk_sizes=np.ones(count, np.int32),
        num_chunks=num_pages,
        mesh=mesh,
        src_sharding_spec=sharding_spec,
        dest_sharding_spec=sharding_spec,
        implementation=implementation,
        interpret=interpret,
        checks=checks,
    )


def gather_pages(
    pool_array: Sequence[jax.Array],
    page_ids: object,
    num_pages: object | None = None,
    *,
    mesh: Mesh | None = None,
    sharding_spec: SpecOrSpecs | None = None,
    implementation: Implementation | None = None,
    interpret: Interpret = False,
    checks: Literal["host", "none"] = "host",
) -> list[jax.Array]:
    """Reads pages of the pools into fresh contiguous arrays: `out[l][i] = pool[l][page_ids[i]]`.

    Args:
      pool_array: one array per layer, [num_pages, ...]; not donated.
      page_ids: pages wanted, [n] integers; may repeat.
      num_pages: how many of the n are valid; None: all. Rows beyond hold unspecified values.
      mesh: as in `multi_layer_copy`.
      sharding_spec: of pool and result alike, as in `multi_layer_copy`.
      implementation: as in `multi_layer_copy`.
      interpret: as in `multi_layer_copy`.
      checks: as in `multi_layer_copy`.

    Returns:
      One [n, ...] array per layer.

    Raises:
      ValueError: as in `multi_layer_copy`.
      NotImplementedError: as in `multi_layer_copy`.
    """
    pools = Layers(
        name="pool_array",
        arrays=list(pool_array),
        spec_name="sharding_spec",
        spec=sharding_spec,
    )
    ids = as_page_ids(page_ids)
    count = ids.shape[0]
    chunks = make_chunks(ids, np.arange(count), np.ones(count, np.int32), num_pages)
    options = Options(implementation=implementation, interpret=interpret, in_place=False)
    plan = make_plan(pools, pools, mesh, options)
    values = host_chunks(chunks) if checks == "host" else None
    if values is not None:
        pages = [pool.shape[0] for pool in pools.arrays]
        check_chunks(values, pages, [count] * len(pages), src_name="page_ids")
        chunks = values
    return run_gather(list(pools.arrays), chunks.src_offsets, chunks.num_chunks, plan=plan)


def small_page_ids(page_ids: np.ndarray | Sequence[int], factor: int) -> np.ndarray:
    """Names the small pages that make up large ones, for `multi_layer_copy(repage=True)`.

    Args:
      page_ids: pages of the pool with the larger pages, [n] integers, host values.
      factor: small pages per large page.

    Returns:
      Pages in the unit of the smaller page size, in token order, [n * factor] int32.

    Raises:
      ValueError: `factor` is below 1, or `page_ids` is not a list of integers.
    """
    if factor < 1:
        raise ValueError(f"factor = {factor} must be at least 1.")
    large = np.asarray(as_page_ids(page_ids))
    return (large[:, None] * factor + np.arange(factor)).reshape(-1).astype(np.int32)
