# SPDX-License-Identifier: Apache-2.0
"""What is settled before a copy between HBM and host memory runs, and the functions that run it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from kvferry.kernels import dispatch, layouts, sharding
from kvferry.kernels.copy_to_host import kernel, reference
from kvferry.kernels.dispatch import Form, Implementation, Interpret

# Compiled functions kept, one per plan; a server has two or three.
_MAX_PLANS = 64

Copy = Callable[..., list[jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How the caller wants the copy to run; see `api.gather_to_host`.

    Attributes:
      to_host: direction; None for a copy of whole arrays to the host.
    """

    implementation: Implementation | None
    interpret: Interpret
    to_host: bool | None
    window: int = kernel.DEFAULT_WINDOW


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a compiled copy depends on besides shapes.

    Attributes:
      implementation: which path runs.
      interpret: simulate the Pallas kernel.
      mesh: None for one device.
      src_specs: per layer, used with a mesh.
      dest_specs: per layer, used with a mesh.
      dest_shardings: where the results go, None for traced destinations.
      to_host: direction; None for a copy of whole arrays to the host.
      window: pages in flight together.
      form: see `reference.copy_pages`.
      as_bits: see `reference.copy_pages`.
    """

    implementation: Implementation
    interpret: Interpret
    mesh: Mesh | None
    src_specs: tuple[PartitionSpec, ...]
    dest_specs: tuple[PartitionSpec, ...]
    dest_shardings: tuple[Sharding, ...] | None
    to_host: bool | None
    window: int
    form: Form
    as_bits: bool


def _layout_problem(
    src: sharding.Layers, dest: sharding.Layers, placement: sharding.Placement, *, paged: bool
) -> str | None:
    """Checks that every device cuts both sides alike; returns why pages cannot move in place."""
    problem = None
    start = 1 if paged else 0
    for layer, (src_shard, dest_shard) in enumerate(
        zip(placement.src_shards, placement.dest_shards, strict=True)
    ):
        if src_shard[start:] != dest_shard[start:]:
            raise ValueError(
                f"{src.name}[{layer}] sharded as {placement.src_specs[layer]} and {dest.name}"
                f"[{layer}] sharded as {placement.dest_specs[layer]} are cut differently: a device "
                f"has {src_shard} and {dest_shard}."
            )
        dtype = dest.arrays[layer].dtype
        why = layouts.layout_problem(dest_shard, dtype) if paged else layouts.dtype_problem(dtype)
        if why is not None and problem is None:
            problem = f"{dest.name}[{layer}]: {why}"
    return problem


def make_plan(
    src: sharding.Layers, dest: sharding.Layers, mesh: Mesh | None, options: Options
) -> Plan:
    """Checks shardings and settles how the copy runs.

    Args:
      src: the sources; shapes and dtypes are those of the destinations, but for the page count.
      dest: the destinations.
      mesh: mesh of all arrays, or None to take theirs.
      options: the caller's wishes.

    Returns:
      The plan.

    Raises:
      ValueError: see `api.gather_to_host`.
      NotImplementedError: see `api.gather_to_host`.
    """
    if options.window < 1:
        raise ValueError(f"window = {options.window} must be at least 1.")
    placement = sharding.place(src, dest, mesh)
    to_host = options.to_host is not False
    sharding.check_memory_kinds(src, placement.platform, host=not to_host)
    sharding.check_memory_kinds(dest, placement.platform, host=to_host)
    problem = _layout_problem(src, dest, placement, paged=options.to_host is not None)
    chosen = dispatch.choose(
        "copy_to_host" if to_host else "copy_to_device",
        options.implementation,
        options.interpret,
        placement.platform,
        problem,
    )
    dtypes = [array.dtype for array in dest.arrays]
    known = all(sharding.is_concrete(array) for array in dest.arrays)
    return Plan(
        implementation=chosen,
        interpret=dispatch.normalise_interpret(options.interpret),
        mesh=placement.mesh,
        src_specs=placement.src_specs,
        dest_specs=placement.dest_specs,
        dest_shardings=tuple(array.sharding for array in dest.arrays) if known else None,
        to_host=options.to_host,
        window=options.window,
        form=dispatch.xla_form(placement.platform),
        as_bits=chosen == "xla" and dispatch.move_bits(placement.platform, dtypes),
    )


def _copy_on_device(
    plan: Plan,
    src: list[jax.Array],
    dest: list[jax.Array],
    page_ids: jax.Array,
    num_pages: jax.Array,
) -> list[jax.Array]:
    """Copies what one device holds."""
    if plan.to_host is None:
        pairs = zip(src, dest, strict=True)
        if plan.implementation == "xla":
            return [reference.copy_whole(s, d) for s, d in pairs]
        return [kernel.copy_whole(s, d, interpret=plan.interpret) for s, d in pairs]
    if plan.implementation == "xla":
        return reference.copy_pages(
            src,
            dest,
            page_ids,
            num_pages,
            to_host=plan.to_host,
            form=plan.form,
            as_bits=plan.as_bits,
        )
    return kernel.copy_pages(
        src,
        dest,
        page_ids,
        num_pages,
        to_host=plan.to_host,
        window=plan.window,
        interpret=plan.interpret,
    )


@functools.lru_cache(maxsize=_MAX_PLANS)
def _compiled(plan: Plan) -> Copy:
    """Returns the jitted copy of a plan: (src, dest, page_ids, num_pages) -> destinations."""
    per_device: Copy = functools.partial(_copy_on_device, plan)
    if plan.mesh is not None:
        per_device = jax.shard_map(
            per_device,
            mesh=plan.mesh,
            in_specs=(list(plan.src_specs), list(plan.dest_specs), *[PartitionSpec()] * 2),
            out_specs=list(plan.dest_specs),
            check_vma=False,
        )

    def copy(
        src: list[jax.Array], dest: list[jax.Array], page_ids: jax.Array, num_pages: jax.Array
    ) -> list[jax.Array]:
        if plan.implementation == "xla":
            # XLA computes in device memory only. On CPU that is the same memory: no copy.
            src = [jax.device_put(x, jax.memory.Space.Device) for x in src]
            dest = [jax.device_put(x, jax.memory.Space.Device) for x in dest]
        return per_device(src, dest, page_ids, num_pages)

    out = None if plan.dest_shardings is None else list(plan.dest_shardings)
    return jax.jit(copy, donate_argnums=1, out_shardings=out)


def run_copy(
    plan: Plan,
    src: list[jax.Array],
    dest: list[jax.Array],
    page_ids: jax.Array | np.ndarray,
    num_pages: jax.Array | np.ndarray,
) -> list[jax.Array]:
    """Runs a planned copy.

    Args:
      plan: how.
      src: per layer, the pool or the slot.
      dest: per layer, the other one; donated.
      page_ids: pages of the pool, [n] int32.
      num_pages: how many of them are valid, [1] int32.

    Returns:
      The updated destinations.
    """
    if not plan.interpret or plan.dest_shardings is None:
        return _compiled(plan)(src, dest, page_ids, num_pages)
    # The simulator knows no host memory: it gets copies in device memory.
    src_copies, dest_copies = ([_default_memory(x) for x in arrays] for arrays in (src, dest))
    simulated = dataclasses.replace(plan, dest_shardings=tuple(x.sharding for x in dest_copies))
    results = _compiled(simulated)(src_copies, dest_copies, page_ids, num_pages)
    for donated in dest:
        donated.delete()
    return [jax.device_put(x, s) for x, s in zip(results, plan.dest_shardings, strict=True)]


def _default_memory(array: jax.Array) -> jax.Array:
    """Returns a copy of an array in its device's default memory."""
    kind = sharding.device_of(array).default_memory().kind
    return jax.device_put(array, array.sharding.with_memory_kind(kind), may_alias=False)
