# SPDX-License-Identifier: Apache-2.0
"""Arrays that lie one after the other in a piece of host memory, and how JAX gets them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib import xla_client

from kvferry.control.engines.base import Spec
from kvferry.control.engines.canary import default_sharding
from kvferry.control.engines.tcp_frames import Bytes, offsets


def sizes_of(specs: Sequence[Spec]) -> list[int]:
    """Returns the bytes of each array."""
    return [spec.size * spec.dtype.itemsize for spec in specs]


def total_bytes(specs: Sequence[Spec]) -> int:
    """Returns the bytes of arrays that lie one after the other as in `tcp_frames.offsets`."""
    return offsets(sizes_of(specs))[1]


def arrays_in(memory: Bytes, specs: Sequence[Spec]) -> list[jax.Array]:
    """Hands host memory to JAX; on CPU the arrays are that memory and no copy of it.

    Args:
        memory: 1-D, uint8, at a multiple of 64 bytes, holding arrays as in `tcp_frames.offsets`.
        specs: The arrays.

    Returns:
        One array for each.
    """
    sizes = sizes_of(specs)
    kinds: dict[tuple[tuple[int, ...], np.dtype], Any] = {}
    arrays = []
    for start, size, spec in zip(offsets(sizes)[0], sizes, specs, strict=True):
        host = memory[start : start + size].view(spec.dtype).reshape(spec.shape)
        sharding = spec.sharding or default_sharding()
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
        devices |= (spec.sharding or default_sharding()).device_set
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
