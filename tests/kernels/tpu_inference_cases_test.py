# SPDX-License-Identifier: Apache-2.0
"""What tpu-inference's public tests ask of its two kernels, asked of ours, on CPU.

The cases (shapes, offsets, poison entries, a mesh with the heads over all devices, a whole array
to pinned host memory) are those of its `tests/distributed/test_kv_transfer.py`. Two things are
stricter here: every layer has data of its own, and every page of every layer is compared, not only
those that are copied. The pools keep their page shape with fewer pages, because they are compared
in full.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvferry.kernels.copy_to_host import copy_to_host
from kvferry.kernels.multi_layer_copy import multi_layer_copy
from kvferry.tests.kernels import oracle
from kvferry.tests.kernels.oracle import Run

_SPEC = P(None, None, "model")
_POOL_PAGES = 600  # the highest destination is 567

_SAME = [Run(0, 0), Run(1, 1), *(Run(page, page) for page in range(10, 18))]
_CASES = {
    "one layer, one page": {"layers": 1, "head": 64, "dtype": "bfloat16", "runs": [Run(0, 0)]},
    "padded list": {"layers": 4, "head": 64, "dtype": "float32", "runs": _SAME, "num_chunks": 2},
    "padded list, pages in the middle": {
        "layers": 4,
        "head": 64,
        "dtype": "bfloat16",
        "runs": [Run(0, 567), Run(1, 32), *_SAME[2:]],
        "num_chunks": 2,
    },
    "runs of several lengths": {
        "layers": 10,
        "head": 128,
        "dtype": "bfloat16",
        "runs": [Run(0, 0, 1), Run(1, 10, 2), Run(3, 20, 3), Run(6, 30, 4)],
    },
}

_SIMULATED: dict[str, Any] = {"interpret": pltpu.InterpretParams()}
both = pytest.mark.parametrize("how", [{}, _SIMULATED], ids=["default", "simulated kernel"])


# The simulator keeps a thread of XLA's waiting for each device: no more of them than CPU cores.
_SIMULATED_DEVICES = 2


def _devices(how: dict[str, Any]) -> np.ndarray:
    devices = jax.devices()
    return np.array(devices[:_SIMULATED_DEVICES] if how else devices)


@both
@pytest.mark.parametrize("case", _CASES)
def test_multi_layer_copy(case: str, how: dict[str, Any]) -> None:
    details: dict[str, Any] = _CASES[case]
    runs, layers = details["runs"], details["layers"]
    num_chunks = details.get("num_chunks", len(runs))
    mesh = Mesh(_devices(how)[None], ("data", "model"))
    heads, replicated = NamedSharding(mesh, _SPEC), NamedSharding(mesh, P())
    # Few tokens per page: a page is one unit to the copy, and all of them are compared.
    page = (2, 8, 2, details["head"])
    pages_copied = sum(run.size for run in runs)
    src = oracle.layers(pages_copied, page, layers, details["dtype"])
    dest = [np.zeros((_POOL_PAGES, *page), array.dtype) for array in src]

    def sharded(arrays: oracle.Arrays) -> list[jax.Array]:
        return [jax.device_put(array, heads) for array in arrays]

    results = multi_layer_copy(
        src_array=sharded(src),
        dest_array=sharded(dest),
        **{
            name: jax.device_put(jnp.asarray(values), replicated)
            for name, values in oracle.split(runs).items()
        },
        num_chunks=jax.device_put(jnp.array([num_chunks], jnp.int32), replicated),
        mesh=mesh,
        src_sharding_spec=_SPEC,
        dest_sharding_spec=_SPEC,
        replicated_sharding_spec=P(),
        **how,
    )
    assert len(results) == layers
    assert {array.sharding.memory_kind for array in results} == {"device"}
    assert all(array.sharding.is_equivalent_to(heads, array.ndim) for array in results)
    oracle.assert_equal(results, oracle.copied(src, dest, runs[:num_chunks]))


@both
@pytest.mark.parametrize("dest_kind", ["pinned_host", "device"])
def test_copy_to_host(dest_kind: str, how: dict[str, Any]) -> None:
    mesh = Mesh(_devices(how), ("x",))
    spec = P(None, "x")
    values = jnp.arange(8 * 128).astype(jnp.bfloat16).reshape(8, 128)
    src = jax.device_put(values, NamedSharding(mesh, spec, memory_kind="device"))
    dest = jax.device_put(jnp.zeros_like(values), NamedSharding(mesh, spec, memory_kind=dest_kind))
    result = copy_to_host(src, dest, mesh, spec, **how)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(values))
    assert result.sharding.memory_kind == dest_kind
    assert result.sharding.is_equivalent_to(src.sharding.with_memory_kind(dest_kind), 2)
