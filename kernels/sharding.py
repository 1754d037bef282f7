# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of one copy are: platform, mesh, and the part that each device holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SpecOrSpecs = PartitionSpec | Sequence[PartitionSpec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where sources and destinations are.

    Attributes:
      platform: "cpu", "tpu", ...
      mesh: None when everything is on one device.
      src_specs: partition spec of each layer's source.
      dest_specs: partition spec of each layer's destination.
      src_shards: shape of one device's part of each source.
      dest_shards: shape of one device's part of each destination.
    """

    platform: str
    mesh: Mesh | None
    src_specs: tuple[PartitionSpec, ...]
    dest_specs: tuple[PartitionSpec, ...]
    src_shards: tuple[tuple[int, ...], ...]
    dest_shards: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """One side of a copy, as the caller gave it.

    Attributes:
      name: the argument's name, for messages.
      arrays: one array per layer.
      spec_name: name of the argument with the partition spec, for messages.
      spec: one spec for all layers, one per layer, or None to take each array's own.
      paged: dimension 0 counts pages, which must not be sharded.
    """

    name: str
    arrays: Sequence[jax.Array]
    spec_name: str
    spec: SpecOrSpecs | None
    paged: bool = True


def is_concrete(array: object) -> bool:
    """Says whether this is a jax array with values, not a tracer or a numpy array."""
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def device_of(array: jax.Array) -> Any:
    """Returns one of the devices that an array with values is on."""
    return next(iter(array.sharding.device_set))


def _mesh_sharding(array: jax.Array) -> NamedSharding | None:
    """Returns the array's NamedSharding over more than one device, if it has one."""
    if not is_concrete(array):
        return None
    sharding = array.sharding
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        return sharding
    return None


def _common_mesh(sides: Sequence[Layers], mesh: Mesh | None) -> Mesh | None:
    """Returns the one mesh of all sharded arrays, which is `mesh` if that is given."""
    owner = "mesh"
    for side in sides:
        for layer, array in enumerate(side.arrays):
            sharding = _mesh_sharding(array)
            if sharding is None:
                continue
            own = cast(Mesh, sharding.mesh)  # abstract only in tracers
            if mesh is None:
                mesh, owner = own, f"{side.name}[{layer}]"
            elif own != mesh:
                raise ValueError(
                    f"{side.name}[{layer}] is on {own}, but {owner} is on {mesh}; one "
                    "copy runs on one mesh."
                )
    return mesh


def _platform(mesh: Mesh | None, sides: Sequence[Layers]) -> str:
    """Returns the platform that the arrays are on, or will be on when they are traced."""
    if mesh is not None:
        return str(mesh.devices.flat[0].platform)
    for side in sides:
        for array in side.arrays:
            if is_concrete(array):
                return str(device_of(array).platform)
    return jax.default_backend()


def _specs(side: Layers) -> tuple[PartitionSpec, ...]:
    """Returns one checked spec per layer."""
    arrays = side.arrays
    if side.spec is None:
        shardings = [_mesh_sharding(array) for array in arrays]
        specs = tuple(PartitionSpec() if s is None else s.spec for s in shardings)
    elif isinstance(side.spec, PartitionSpec):
        specs = (side.spec,) * len(arrays)
    else:
        specs = tuple(side.spec)
        if len(specs) != len(arrays):
            raise ValueError(f"{side.spec_name} has {len(specs)} specs for {len(arrays)} layers.")
    for layer, (spec, array) in enumerate(zip(specs, arrays, strict=True)):
        _check_spec(side, layer, spec, array)
    return specs


def _check_spec(side: Layers, layer: int, spec: PartitionSpec, array: jax.Array) -> None:
    """Raises ValueError for a spec that does not fit its array."""
    if len(spec) > array.ndim:
        raise ValueError(
            f"{side.spec_name} = {spec} has {len(spec)} entries, but {side.name}[{layer}] has "
            f"shape {array.shape}."
        )
    if side.paged and len(spec) and spec[0] not in (None, ()):
        raise ValueError(
            f"{side.spec_name} = {spec} shards the page axis (dimension 0) of "
            f"{side.name}[{layer}]; a page id would mean another page on each device. Shard "
            "heads instead."
        )
    sharding = _mesh_sharding(array)
    if sharding is None:
        return
    wanted = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    if not sharding.is_equivalent_to(wanted, array.ndim):
        raise ValueError(
            f"{side.spec_name} = {spec} contradicts {side.name}[{layer}], which is sharded as "
            f"{sharding.spec}."
        )


def _shards(
    side: Layers, mesh: Mesh | None, specs: Sequence[PartitionSpec]
) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of one device's part of each layer."""
    if mesh is None:
        return tuple(tuple(array.shape) for array in side.arrays)
    return tuple(
        NamedSharding(mesh, spec).shard_shape(tuple(array.shape))
        for spec, array in zip(specs, side.arrays, strict=True)
    )


def place(src: Layers, dest: Layers, mesh: Mesh | None) -> Placement:
    """Finds out where the two sides of a copy are.

    Args:
      src: the sources.
      dest: the destinations.
      mesh: mesh of all arrays; None: taken from the arrays that have values.

    Returns:
      The placement; with no mesh, or one of one device, the specs do not matter.

    Raises:
      ValueError: two meshes, a spec that does not fit its array, a sharded page axis, a number of
        specs that is not that of the layers, or a dimension that a mesh axis does not divide.
    """
    mesh = _common_mesh((src, dest), mesh)
    platform = _platform(mesh, (dest, src))
    src_specs, dest_specs = _specs(src), _specs(dest)
    return Placement(
        platform=platform,
        mesh=None if mesh is None or mesh.size == 1 else mesh,
        src_specs=src_specs,
        dest_specs=dest_specs,
        src_shards=_shards(src, mesh, src_specs),
        dest_shards=_shards(dest, mesh, dest_specs),
    )


def check_memory_kinds(side: Layers, platform: str, *, host: bool) -> None:
    """Checks that all arrays with values are in host, or in device memory.

    Args:
      side: the arrays.
      platform: where they are; only on TPU are the two different.
      host: they have to be in host memory.

    Raises:
      ValueError: one is in the other memory.
    """
    if platform != "tpu":
        return
    for layer, array in enumerate(side.arrays):
        kind = array.sharding.memory_kind or "device" if is_concrete(array) else None
        if kind is not None and host != (kind == "pinned_host"):
            raise ValueError(
                f"{side.name}[{layer}] is in memory kind {kind!r}, it has to be in "
                f"{'pinned_host' if host else 'device'!r}."
            )
