# SPDX-License-Identifier: Apache-2.0
"""The bytes of JAX's arrays in host memory, and host memory as JAX's arrays."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib import xla_client

from kvferry.control.engines.base import Spec, sharding_of
from kvferry.control.engines.frames import Bytes, offsets


def sizes_of(arrays: Sequence[Spec] | Sequence[jax.Array]) -> list[int]:
    """Returns the bytes of each array."""
    return [array.size * array.dtype.itemsize for array in arrays]


def total_bytes(arrays: Sequence[Spec] | Sequence[jax.Array]) -> int:
    """Returns the bytes of arrays that lie one after the other as in `frames.offsets`."""
    return offsets(sizes_of(arrays))[1]


def arrays_in(memory: Bytes, specs: Sequence[Spec]) -> list[jax.Array]:
    """Hands host memory to JAX; on CPU the arrays are that memory and no copy of it.

    Args:
        memory: 1-D, uint8, at a multiple of 64 bytes, holding arrays as in `frames.offsets`.
        specs: The arrays.

    Returns:
        One array for each.
    """
    sizes = sizes_of(specs)
    kinds: dict[tuple[tuple[int, ...], np.dtype], Any] = {}
    arrays = []
    for start, size, spec in zip(offsets(sizes)[0], sizes, specs, strict=True):
        host = memory[start : start + size].view(spec.dtype).reshape(spec.shape)
        sharding = sharding_of(spec)
        devices = list(sharding.device_set)
        if len(devices) > 1:
            arrays.append(jax.device_put(host, sharding))
            continue
        # What device_put comes to, without the 20 to 30 us that it takes to get there: for the
        # arrays of a small transfer that is as long as their bytes are on the way.
        key = (spec.shape, spec.dtype)
        kind = kinds[key] = kinds.get(key) or jax.typeof(host)
        arrays.append(xla_client.batched_device_put(kind, sharding, [host], devices, True))
    return arrays


def on_one_cpu_device(specs: Sequence[Spec]) -> bool:
    """Returns whether all arrays belong on the same CPU device, where they need no copy."""
    # Any: jax.Device has a platform, but its stub does not say so.
    devices: set[Any] = set()
    for spec in specs:
        devices |= sharding_of(spec).device_set
    return len(devices) == 1 and devices.pop().platform == "cpu"


def are_in(memory: Bytes, arrays: Sequence[jax.Array], specs: Sequence[Spec]) -> bool:
    """Returns whether arrays are the memory that they were made of, and not copies of it.

    One of each kind is looked at: they lie alike.

    Args:
        memory: As given to `arrays_in`.
        arrays: What that returned.
        specs: As given to it.
    """
    starts, _ = offsets(sizes_of(specs))
    base = memory.ctypes.data
    kinds = {(spec.shape, spec.dtype): index for index, spec in enumerate(specs) if spec.size}
    return all(
        arrays[index].unsafe_buffer_pointer() == base + starts[index] for index in kinds.values()
    )


def host_parts(array: jax.Array) -> Iterator[tuple[tuple[slice, ...] | None, np.ndarray]]:
    """Yields an array's host values, shard by shard; waits until they are computed.

    Yields:
        Where in the array a part belongs (None: it is the whole), and the part.

    Raises:
        jax.errors.JaxRuntimeError: If the computation has failed.
    """
    if len(array.sharding.device_set) == 1:
        yield None, np.asarray(array)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)


def as_bytes(array: np.ndarray | jax.Array) -> Bytes:
    """Returns the bytes of an array, 1-D; a copy only if they are not in host memory in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
