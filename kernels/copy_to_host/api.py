# SPDX-License-Identifier: Apache-2.0
"""Copies between HBM and host memory, into arrays that exist already.

`copy_to_host` moves one whole array and has the signature of tpu-inference's function of that
name. `gather_to_host` gathers pages of all layers straight into a slot of host arrays, and
`copy_to_device` brings a slot back into pages of the pools. None of them waits: `is_ready()` of
the returned arrays tells when the bytes are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from kvferry.kernels.chunks import as_page_ids, check_chunks, host_chunks, make_chunks
from kvferry.kernels.copy_to_host import kernel
from kvferry.kernels.copy_to_host.plan import Options, make_plan, run_copy
from kvferry.kernels.dispatch import Implementation, Interpret
from kvferry.kernels.sharding import Layers, SpecOrSpecs


def copy_to_host(
    src: jax.Array,
    dest: jax.Array,
    mesh: Mesh | None = None,
    sharding_spec: PartitionSpec | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Copies an array from HBM into an existing host array, which is donated.

    Args:
      src: the array to copy, any shape.
      dest: same shape, dtype and partition, with a host memory kind ("pinned_host" on TPU).
        Donated: use the returned array from then on.
      mesh: mesh of both. None: taken from the arrays.
      sharding_spec: partition spec of both. None: taken from the arrays.
      implementation: "mosaic_tpu" (Pallas), "xla", or None for the best that can run.
      interpret: simulate the Pallas kernel on CPU; True or `pltpu.InterpretParams`.

    Returns:
      The bytes of `src` in `dest`'s sharding and memory kind. `is_ready()` tells completion.

    Raises:
      ValueError: shapes, dtypes, meshes or specs disagree.
      NotImplementedError: the implementation asked for cannot run here.
    """
    if src.shape != dest.shape or src.dtype != dest.dtype:
        raise ValueError(
            f"src is {src.dtype}{list(src.shape)}, dest is {dest.dtype}{list(dest.shape)}; they "
            "must be equal."
        )
    src_side, dest_side = (
        Layers(name=name, arrays=[x], spec_name="sharding_spec", spec=sharding_spec, paged=False)
        for name, x in (("src", src), ("dest", dest))
    )
    options = Options(implementation=implementation, interpret=interpret, to_host=None)
    plan = make_plan(src_side, dest_side, mesh, options)
    unused = np.zeros(1, np.int32)
    return run_copy(plan, [src], [dest], unused, unused)[0]


def _slots_and_pools(
    slot_array: Sequence[jax.Array], pool_array: Sequence[jax.Array], spec: SpecOrSpecs | None
) -> tuple[Layers, Layers]:
    """Names both sides of a copy of pages."""
    slots = Layers(name="slot_array", arrays=list(slot_array), spec_name="sharding_spec", spec=spec)
    pools = Layers(name="pool_array", arrays=list(pool_array), spec_name="sharding_spec", spec=spec)
    return slots, pools


def _copy_pages(
    slots: Layers,
    pools: Layers,
    page_ids: object,
    num_pages: object | None,
    mesh: Mesh | None,
    options: Options,
    checks: str,
) -> list[jax.Array]:
    """Checks and runs `gather_to_host` or `copy_to_device`."""
    if checks not in ("host", "none"):
        raise ValueError(f"checks = {checks!r} is unknown; use 'host' or 'none'.")
    if len(slots.arrays) != len(pools.arrays) or not slots.arrays:
        raise ValueError(
            f"slot_array has {len(slots.arrays)} layers, pool_array has {len(pools.arrays)}; they "
            "must be equally many, and at least one."
        )
    ids = as_page_ids(page_ids)
    count = ids.shape[0]
    for layer, (slot, pool) in enumerate(zip(slots.arrays, pools.arrays, strict=True)):
        if slot.dtype != pool.dtype or slot.shape[1:] != pool.shape[1:]:
            raise ValueError(
                f"slot_array[{layer}] has pages {slot.dtype}{list(slot.shape[1:])}, "
                f"pool_array[{layer}] has {pool.dtype}{list(pool.shape[1:])}; they must be equal."
            )
        if count > slot.shape[0]:
            raise ValueError(
                f"page_ids has {count} entries, slot_array[{layer}] only {slot.shape[0]} pages."
            )
    chunks = make_chunks(np.arange(count), ids, np.ones(count, np.int32), num_pages)
    values = host_chunks(chunks) if checks == "host" else None
    if values is not None:
        pages = [pool.shape[0] for pool in pools.arrays]
        check_chunks(
            values,
            [count] * len(pages),
            pages,
            # A page may be read twice, but not written twice.
            distinct_dest=options.to_host is False,
            dest_name="page_ids",
        )
        chunks = values
    src, dest = (pools, slots) if options.to_host else (slots, pools)
    plan = make_plan(src, dest, mesh, options)
    arrays = list(src.arrays), list(dest.arrays)
    return run_copy(plan, *arrays, chunks.dest_offsets, chunks.num_chunks)


def gather_to_host(
    pool_array: Sequence[jax.Array],
    slot_array: Sequence[jax.Array],
    page_ids: object,
    num_pages: object | None = None,
    *,
    mesh: Mesh | None = None,
    sharding_spec: SpecOrSpecs | None = None,
    implementation: Implementation | None = None,
    interpret: Interpret = False,
    window: int = kernel.DEFAULT_WINDOW,
    checks: Literal["host", "none"] = "host",
) -> list[jax.Array]:
    """Gathers pages of all layers into a host slot: `slot[l][i] = pool[l][page_ids[i]]`.

    The pages go straight from the pool into the slot: no gathered copy in HBM. Dispatch it on the
    thread that owns the pool, before the step that donates the pool next.

    Args:
      pool_array: one array per layer, [pool_pages, ...]; not donated.
      slot_array: one pre-allocated host array per layer, [slot_pages, ...]; donated: the slot is
        the returned arrays from then on.
      page_ids: pages wanted, [n] integers, n <= slot_pages; may repeat. One compilation per n.
      num_pages: how many of the n are valid; None: all. Rows beyond keep what they held.
      mesh: mesh of all arrays. None: taken from the arrays.
      sharding_spec: partition spec of pool and slot, one for all layers or one per layer; not the
        page axis. None: taken from the arrays.
      implementation: "mosaic_tpu" (Pallas), "xla", or None for the best that can run.
      interpret: simulate the Pallas kernel on CPU; True or `pltpu.InterpretParams`.
      window: DMAs in flight together (Pallas only).
      checks: "host" checks concrete page ids before anything runs; "none" trusts the caller.

    Returns:
      The updated slot, in its shardings and memory kind. `is_ready()` tells completion.

    Raises:
      ValueError: layer counts, shapes, dtypes, meshes or specs disagree, a page id is out of
        range, or num_pages is not within page_ids.
      NotImplementedError: the implementation asked for cannot run here or cannot move this layout
        in place; the message says which layout it could.
    """
    slots, pools = _slots_and_pools(slot_array, pool_array, sharding_spec)
    options = Options(
        implementation=implementation, interpret=interpret, to_host=True, window=window
    )
    return _copy_pages(slots, pools, page_ids, num_pages, mesh, options, checks)


def copy_to_device(
    slot_array: Sequence[jax.Array],
    pool_array: Sequence[jax.Array],
    page_ids: object,
    num_pages: object | None = None,
    *,
    mesh: Mesh | None = None,
    sharding_spec: SpecOrSpecs | None = None,
    implementation: Implementation | None = None,
    interpret: Interpret = False,
    window: int = kernel.DEFAULT_WINDOW,
    checks: Literal["host", "none"] = "host",
) -> list[jax.Array]:
    """Brings a host slot back into pages of the pools: `pool[l][page_ids[i]] = slot[l][i]`.

    Args:
      slot_array: one host array per layer, [slot_pages, ...]; not donated. It must not be reused
        before the returned pools are ready.
      pool_array: one array per layer, [pool_pages, ...]; donated.
      page_ids: where each row of the slot goes, [n] integers, n <= slot_pages; distinct.
      num_pages: how many of the n are valid; None: all. The rest touches nothing.
      mesh: as in `gather_to_host`.
      sharding_spec: as in `gather_to_host`.
      implementation: as in `gather_to_host`.
      interpret: as in `gather_to_host`.
      window: as in `gather_to_host`.
      checks: as in `gather_to_host`.

    Returns:
      The updated pools.

    Raises:
      ValueError: as in `gather_to_host`, or a page id occurs twice.
      NotImplementedError: as in `gather_to_host`.
    """
    slots, pools = _slots_and_pools(slot_array, pool_array, sharding_spec)
    options = Options(
        implementation=implementation, interpret=interpret, to_host=False, window=window
    )
    return _copy_pages(slots, pools, page_ids, num_pages, mesh, options, checks)
