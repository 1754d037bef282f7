# SPDX-License-Identifier: Apache-2.0
"""Host memory as JAX's arrays, made the short way: as `jax.device_put` would have made them."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.frames import offsets
from kvferry.control.engines.host_arrays import (
    are_in,
    arrays_in,
    as_bytes,
    on_one_cpu_device,
    sizes_of,
    total_bytes,
)
from kvferry.control.engines.tcp_buffers import BufferPool
from kvferry.tests.control.engine_ends import DTYPES, same_bytes

FIRST = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SECOND = jax.sharding.SingleDeviceSharding(jax.devices()[1])


def _in_memory(arrays: list[jax.Array]) -> np.ndarray:
    memory = BufferPool().lend(total_bytes(arrays))
    for array, start in zip(arrays, offsets(sizes_of(arrays))[0], strict=True):
        memory[start : start + array.nbytes] = as_bytes(array)
    return memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [None, FIRST, SECOND])
def test_they_are_what_device_put_makes(dtype: str, place: jax.sharding.Sharding | None) -> None:
    arrays = [jnp.arange(60).reshape(shape).astype(dtype) for shape in [(60,), (3, 4, 5)]]
    specs = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place) for array in arrays]
    made = arrays_in(_in_memory(arrays), specs)
    for ours, array in zip(made, arrays, strict=True):
        # Any: jax.Array has a format, but its stub does not say so.
        theirs: Any = jax.device_put(np.asarray(array), place or FIRST)
        same_bytes(ours, theirs)
        assert ours.sharding == theirs.sharding and ours.committed
        assert ours.aval == theirs.aval and theirs.format == cast(Any, ours).format
        same_bytes(jax.jit(lambda x: x[::-1])(ours), theirs[::-1])


def test_they_are_the_memory_and_no_copy_of_it() -> None:
    arrays = [jnp.arange(20.0), jnp.zeros(0), jnp.arange(7, dtype=jnp.int8)]
    specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    memory = _in_memory(arrays)
    made = arrays_in(memory, specs)
    assert on_one_cpu_device(specs) and are_in(memory, made, specs)
    assert not are_in(memory, arrays, specs)


def test_arrays_over_several_devices() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jnp.arange(20.0)
    specs = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)]
    (made,) = arrays_in(_in_memory([array]), specs)
    same_bytes(made, array)
    assert made.sharding == place and not on_one_cpu_device(specs)
