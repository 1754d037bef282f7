# SPDX-License-Identifier: Apache-2.0
"""What is settled before a copy runs, and the jitted functions that run it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, PartitionSpec

from kvferry.kernels import dispatch, layouts, sharding
from kvferry.kernels.chunks import Chunks, guard_chunks
from kvferry.kernels.dispatch import Form, Implementation, Interpret
from kvferry.kernels.multi_layer_copy import kernel, reference

PerDevice = Callable[..., list[jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How the caller wants the copy to run; see `api.multi_layer_copy`.

    Attributes:
      in_place: the destinations exist already; else they are new arrays.
    """

    implementation: Implementation | None
    interpret: Interpret
    window: int = kernel.DEFAULT_WINDOW
    repage: bool = False
    in_place: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a compiled copy depends on besides shapes.

    Attributes:
      implementation: which path runs.
      interpret: simulate the Pallas kernel.
      window: layers in flight together.
      mesh: None for one device.
      src_specs: per layer, used with a mesh.
      dest_specs: per layer, used with a mesh.
      src_split: pages that each source page is cut into.
      dest_split: pages that each destination page is cut into.
      guard: make chunks that leave a pool or overlap no-ops, and report them.
      form: see `reference.copy_layers`.
      as_bits: see `reference.copy_layers`.
    """

    implementation: Implementation
    interpret: Interpret
    window: int
    mesh: Mesh | None
    src_specs: tuple[PartitionSpec, ...]
    dest_specs: tuple[PartitionSpec, ...]
    src_split: int
    dest_split: int
    guard: bool
    form: Form
    as_bits: bool

    def src_pages(self, arrays: Sequence[jax.Array]) -> list[int]:
        """Returns the pages of each source, in the unit in which the chunk list counts."""
        return [self.src_split * array.shape[0] for array in arrays]

    def dest_pages(self, arrays: Sequence[jax.Array]) -> list[int]:
        """Returns the pages of each destination, in the unit in which the chunk list counts."""
        return [self.dest_split * array.shape[0] for array in arrays]


def _page_factor(layer: int, src: jax.Array, dest: jax.Array) -> tuple[int, int]:
    """Returns into how many pages each page of source and destination is cut; one of them is 1."""
    fits = src.ndim >= 2 and dest.ndim == src.ndim and src.shape[2:] == dest.shape[2:]
    small, large = sorted((src.shape[1], dest.shape[1])) if fits else (0, 0)
    if not small or large % small:
        raise ValueError(
            f"src_array[{layer}] has pages of shape {src.shape[1:]}, dest_array[{layer}] of shape "
            f"{dest.shape[1:]}; to re-page, the first dimension of one has to be a multiple of the "
            "other's and the rest equal."
        )
    return src.shape[1] // small, dest.shape[1] // small


def _check_layers(
    src_array: Sequence[jax.Array], dest_array: Sequence[jax.Array], *, repage: bool
) -> tuple[int, int]:
    """Checks that both lists describe the same layers; returns how pages are cut."""
    if len(src_array) != len(dest_array):
        raise ValueError(
            f"src_array has {len(src_array)} layers, dest_array has {len(dest_array)}; they must "
            "be equally many."
        )
    if not src_array:
        raise ValueError("src_array and dest_array hold 0 layers; pass at least one.")
    cuts = (1, 1)
    for layer, (src, dest) in enumerate(zip(src_array, dest_array, strict=True)):
        if src.dtype != dest.dtype:
            raise ValueError(
                f"src_array[{layer}] has dtype {src.dtype}, dest_array[{layer}] has {dest.dtype}; "
                "a copy does not convert."
            )
        if repage:
            own = _page_factor(layer, src, dest)
            if layer and own != cuts:
                raise ValueError(
                    f"layer {layer} re-pages {own[0]} to {own[1]}, layer 0 {cuts[0]} to {cuts[1]}; "
                    "one chunk list cannot serve both."
                )
            cuts = own
        elif src.ndim < 1 or src.shape[1:] != dest.shape[1:]:
            raise ValueError(
                f"src_array[{layer}] has pages of shape {src.shape[1:]}, dest_array[{layer}] of "
                f"shape {dest.shape[1:]}; they must be equal (or see repage)."
            )
    return cuts


def _cut_shape(shape: Sequence[int], split: int) -> tuple[int, ...]:
    """Returns the shape of a pool whose pages are cut into `split` pages each."""
    if split == 1:
        return tuple(shape)
    return (shape[0] * split, shape[1] // split, *shape[2:])


def _layout_problem(
    src: sharding.Layers,
    dest: sharding.Layers,
    placement: sharding.Placement,
    cuts: tuple[int, int],
) -> str | None:
    """Checks that every device cuts pages alike; returns why the layout cannot move in place."""
    problem = None
    for layer, (src_shard, dest_shard) in enumerate(
        zip(placement.src_shards, placement.dest_shards, strict=True)
    ):
        specs = placement.src_specs[layer], placement.dest_specs[layer]
        if max(cuts) > 1 and any(len(spec) > 1 and spec[1] not in (None, ()) for spec in specs):
            raise ValueError(
                f"repage cuts pages along dimension 1, which {specs[0]} or {specs[1]} shards in "
                f"layer {layer}."
            )
        src_view = _cut_shape(src_shard, cuts[0])
        dest_view = _cut_shape(dest_shard, cuts[1])
        if src_view[1:] != dest_view[1:]:
            raise ValueError(
                f"{src.name}[{layer}] sharded as {specs[0]} and {dest.name}[{layer}] sharded as "
                f"{specs[1]} have different pages on a device: {src_view[1:]} and {dest_view[1:]}."
            )
        dtype = dest.arrays[layer].dtype
        for name, shape, view in (
            (src.name, src_shard, src_view),
            (dest.name, dest_shard, dest_view),
        ):
            why = layouts.layout_problem(shape, dtype) or layouts.view_problem(shape, view, dtype)
            if why is not None and problem is None:
                problem = f"{name}[{layer}]: {why}"
    return problem


def make_plan(
    src: sharding.Layers, dest: sharding.Layers, mesh: Mesh | None, options: Options
) -> Plan:
    """Checks what does not depend on the chunk list and settles how the copy runs.

    Args:
      src: the sources.
      dest: the destinations.
      mesh: mesh of all arrays, or None to take theirs.
      options: the caller's wishes.

    Returns:
      The plan.

    Raises:
      ValueError: see `api.multi_layer_copy`.
      NotImplementedError: see `api.multi_layer_copy`.
    """
    if options.window < 1:
        raise ValueError(f"window = {options.window} must be at least 1.")
    cuts = _check_layers(src.arrays, dest.arrays, repage=options.repage)
    placement = sharding.place(src, dest, mesh)
    for side in (src, dest):
        sharding.check_memory_kinds(side, placement.platform, host=False)
    problem = _layout_problem(src, dest, placement, cuts)
    chosen = dispatch.choose(
        "multi_layer_copy", options.implementation, options.interpret, placement.platform, problem
    )
    dtypes = [array.dtype for array in dest.arrays]
    writes_in_xla = chosen == "xla" and options.in_place
    return Plan(
        implementation=chosen,
        interpret=dispatch.normalise_interpret(options.interpret),
        window=min(options.window, len(src.arrays)),
        mesh=placement.mesh,
        src_specs=placement.src_specs,
        dest_specs=placement.dest_specs,
        src_split=cuts[0],
        dest_split=cuts[1],
        guard=False,
        form=dispatch.xla_form(placement.platform),
        as_bits=writes_in_xla and dispatch.move_bits(placement.platform, dtypes),
    )


def _on_mesh(
    plan: Plan, per_device: PerDevice, in_specs: tuple[object, ...], out_specs: object
) -> PerDevice:
    """Wraps a function of one device's arrays so that it takes arrays of the plan's mesh."""
    if plan.mesh is None:
        return per_device
    return jax.shard_map(
        per_device, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="dest_array")
def run_copy(
    *, src_array: list[jax.Array], dest_array: list[jax.Array], chunks: Chunks, plan: Plan
) -> tuple[list[jax.Array], jax.Array | None]:
    """Runs a planned copy.

    Args:
      src_array: per layer, [src_pages, ...].
      dest_array: per layer, [dest_pages, ...]; donated.
      chunks: the runs.
      plan: how.

    Returns:
      The updated destinations, and with `plan.guard` the status of each chunk, [n] int32.
    """
    status = None
    if plan.guard:
        pages = plan.src_pages(src_array), plan.dest_pages(dest_array)
        chunks, status = guard_chunks(chunks, *pages)

    def per_device(src: list[jax.Array], dest: list[jax.Array], chunks: Chunks) -> list[jax.Array]:
        if plan.implementation == "xla":
            splits = plan.src_split, plan.dest_split
            return reference.copy_layers(
                src, dest, chunks, splits=splits, form=plan.form, as_bits=plan.as_bits
            )
        copied = kernel.copy_layers(
            [reference.cut_pages(x, plan.src_split) for x in src],
            [reference.cut_pages(x, plan.dest_split) for x in dest],
            chunks,
            window=plan.window,
            interpret=plan.interpret,
        )
        return [x.reshape(before.shape) for x, before in zip(copied, dest, strict=True)]

    in_specs = (list(plan.src_specs), list(plan.dest_specs), PartitionSpec())
    run = _on_mesh(plan, per_device, in_specs, list(plan.dest_specs))
    return run(src_array, dest_array, chunks), status


@functools.partial(jax.jit, static_argnames="plan")
def run_gather(
    pool_array: list[jax.Array], page_ids: jax.Array, num_pages: jax.Array, *, plan: Plan
) -> list[jax.Array]:
    """Runs a planned gather into fresh arrays.

    Args:
      pool_array: per layer, [pool_pages, ...].
      page_ids: pages wanted, [n] int32.
      num_pages: how many of them are valid, [1] int32.
      plan: how.

    Returns:
      Per layer, [n, ...].
    """

    def per_device(
        pools: list[jax.Array], page_ids: jax.Array, num_pages: jax.Array
    ) -> list[jax.Array]:
        if plan.implementation == "xla":
            return reference.gather_layers(pools, page_ids, num_pages, form=plan.form)
        return kernel.gather_layers(
            pools, page_ids, num_pages, window=plan.window, interpret=plan.interpret
        )

    in_specs = (list(plan.src_specs), PartitionSpec(), PartitionSpec())
    run = _on_mesh(plan, per_device, in_specs, list(plan.src_specs))
    return run(pool_array, page_ids, num_pages)
