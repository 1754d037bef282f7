# SPDX-License-Identifier: Apache-2.0
"""Pools that are sharded over a mesh, on any axis but the page axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvferry.kernels.multi_layer_copy import gather_pages, multi_layer_copy, scatter_pages
from kvferry.tests.kernels import oracle
from kvferry.tests.kernels.oracle import Run
from kvferry.tests.kernels.simulator import PARAMS, params_id, watched

_PAGE = (4, 8, 128)
_RUNS = [Run(3, 0), Run(0, 5, 3)]


def _mesh(x: int, y: int, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: x * y]).reshape(x, y)
    return Mesh(devices, ("x", "y"), axis_types=(kind, kind))


def _put(arrays: oracle.Arrays, mesh: Mesh, spec: P) -> list[Any]:
    return [jax.device_put(jnp.array(array), NamedSharding(mesh, spec)) for array in arrays]


@pytest.mark.parametrize(
    "spec",
    [
        P(),
        P(None, None, "x"),
        P(None, None, ("x", "y")),
        P(None, "y", "x"),
        P(None, None, None, "y"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_every_spec(spec: P, kind: AxisType) -> None:
    """With the mesh and the specs taken from the arrays."""
    mesh = _mesh(2, 4, kind)
    src, dest = oracle.layers(5, _PAGE, 2), oracle.layers(9, _PAGE, 2, seed=1)
    results = multi_layer_copy(
        src_array=_put(src, mesh, spec), dest_array=_put(dest, mesh, spec), **oracle.split(_RUNS)
    )
    oracle.assert_equal(results, oracle.copied(src, dest, _RUNS))
    sharding = NamedSharding(mesh, spec)
    assert all(array.sharding.is_equivalent_to(sharding, array.ndim) for array in results)


@pytest.mark.parametrize("params", PARAMS, ids=params_id)
def test_every_device_runs_the_kernel(params: pltpu.InterpretParams) -> None:
    mesh, spec = _mesh(2, 1), P(None, None, "x")
    src, dest = oracle.layers(5, _PAGE, 2), oracle.layers(9, _PAGE, 2, seed=1)
    sources, dests = _put(src, mesh, spec), _put(dest, mesh, spec)
    with watched(params):
        results = multi_layer_copy(
            src_array=sources, dest_array=dests, **oracle.split(_RUNS), interpret=params
        )
        jax.block_until_ready(results)
    oracle.assert_equal(results, oracle.copied(src, dest, _RUNS))


def test_specs_per_layer() -> None:
    """As in a hybrid model: heads are sharded, a latent is not."""
    mesh = _mesh(2, 4)
    specs = [P(None, None, "y"), P()]
    src = oracle.layers(5, _PAGE, 1) + oracle.layers(5, (16, 640), 1)
    dest = oracle.layers(9, _PAGE, 1, seed=1) + oracle.layers(9, (16, 640), 1, seed=1)

    def put(arrays: oracle.Arrays) -> list[Any]:
        return [_put([array], mesh, spec)[0] for array, spec in zip(arrays, specs, strict=True)]

    results = multi_layer_copy(
        src_array=put(src),
        dest_array=put(dest),
        **oracle.split(_RUNS),
        mesh=mesh,
        src_sharding_spec=specs,
        dest_sharding_spec=specs,
    )
    oracle.assert_equal(results, oracle.copied(src, dest, _RUNS))


def test_traced_with_a_mesh() -> None:
    mesh, spec = _mesh(2, 2), P(None, None, "x")

    @jax.jit
    def step(pages: Any, pool: Any, ids: Any) -> Any:
        pool = scatter_pages(pages, pool, ids, mesh=mesh, sharding_spec=spec)
        return pool, gather_pages(pool, ids, mesh=mesh, sharding_spec=spec)

    pages, pool = oracle.layers(3, _PAGE, 2), oracle.layers(9, _PAGE, 2, seed=1)
    ids = jnp.array([7, 0, 4], jnp.int32)
    scattered, gathered = step(_put(pages, mesh, spec), _put(pool, mesh, spec), ids)
    runs = [Run(0, 7), Run(1, 0), Run(2, 4)]
    oracle.assert_equal(scattered, oracle.copied(pages, pool, runs))
    oracle.assert_equal(gathered, pages)


def test_traced_without_a_mesh() -> None:
    """XLA partitions the copy by itself when the caller says nothing."""
    mesh, spec = _mesh(2, 2), P(None, None, "x")
    pages, pool = oracle.layers(3, _PAGE, 2), oracle.layers(9, _PAGE, 2, seed=1)
    ids = jnp.array([7, 0, 4], jnp.int32)
    step = jax.jit(scatter_pages, donate_argnums=1)
    results = step(_put(pages, mesh, spec), _put(pool, mesh, spec), ids)
    runs = [Run(0, 7), Run(1, 0), Run(2, 4)]
    oracle.assert_equal(results, oracle.copied(pages, pool, runs))


def test_sharded_pool_stays_where_it_is() -> None:
    mesh, spec = _mesh(2, 2), P(None, None, "x")
    pages = oracle.layers(3, _PAGE, 2, "uint16")
    pool = _put(oracle.layers(9, _PAGE, 2, "uint16", seed=1), mesh, spec)

    def addresses(arrays: list[Any]) -> list[int]:
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        return [shard.unsafe_buffer_pointer() for shard in shards]

    before = addresses(pool)
    results = scatter_pages(_put(pages, mesh, spec), pool, [7, 0, 4])
    assert addresses(results) == before


def test_mesh_of_one_device_is_no_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    src, dest = oracle.layers(5, _PAGE, 1), oracle.layers(9, _PAGE, 1, seed=1)
    results = multi_layer_copy(
        src_array=_put(src, mesh, P(None, None, "x")),
        dest_array=oracle.device(dest),
        **oracle.split(_RUNS),
        mesh=mesh,
        src_sharding_spec=P(None, None, "x"),
        dest_sharding_spec=P(None, None, "x"),
    )
    oracle.assert_equal(results, oracle.copied(src, dest, _RUNS))
