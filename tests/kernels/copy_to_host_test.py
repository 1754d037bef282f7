# SPDX-License-Identifier: Apache-2.0
"""copy_to_host, gather_to_host and copy_to_device, on both implementations."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from kvferry.kernels import dispatch
from kvferry.kernels.copy_to_host import copy_to_device, copy_to_host, gather_to_host, kernel
from kvferry.kernels.copy_to_host.plan import _compiled
from kvferry.tests.kernels import oracle
from kvferry.tests.kernels.oracle import Run
from kvferry.tests.kernels.simulator import PARAMS, params_id, watched

_DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_PAGE = (4, 128)
_HOST = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

_XLA: dict[str, Any] = {"implementation": "xla"}
_SIMULATED: dict[str, Any] = {
    "implementation": "mosaic_tpu",
    "interpret": pltpu.InterpretParams(dma_execution_mode="on_wait"),
}
both = pytest.mark.parametrize("how", [_XLA, _SIMULATED], ids=["xla", "mosaic_tpu"])


def _host(arrays: oracle.Arrays) -> list[Any]:
    return [jax.device_put(array, _HOST, may_alias=False) for array in oracle.device(arrays)]


def _kinds(arrays: list[Any]) -> set[str]:
    return {array.sharding.memory_kind for array in arrays}


@both
@pytest.mark.parametrize("dtype", _DTYPES)
def test_there_and_back(dtype: str, how: dict[str, Any]) -> None:
    """As in offload: some pages go to the host, and later come back to other pages."""
    pools = oracle.layers(9, _PAGE, 2, dtype)
    slots = oracle.layers(5, _PAGE, 2, dtype, seed=1)
    out, back = [7, 0, 4, 77, 78], [1, 2, 8, 77, 78]
    slot = gather_to_host(oracle.device(pools), _host(slots), out, 3, **how)
    expected = oracle.copied(pools, slots, [Run(page, row) for row, page in enumerate(out[:3])])
    oracle.assert_equal(slot, expected)
    assert _kinds(slot) == {"pinned_host"}

    others = oracle.layers(9, _PAGE, 2, dtype, seed=2)
    pool = copy_to_device(slot, oracle.device(others), back, 3, **how)
    runs = [Run(row, page) for row, page in enumerate(back[:3])]
    oracle.assert_equal(pool, oracle.copied(expected, others, runs))
    assert _kinds(pool) == {"device"}
    oracle.assert_equal(slot, expected)  # the slot is not donated


@both
def test_layers_may_differ(how: dict[str, Any]) -> None:
    pools = oracle.layers(9, (16, 128), 1, "bfloat16") + oracle.layers(6, (3,), 1, "int8")
    slots = oracle.layers(4, (16, 128), 1, "bfloat16", seed=1) + oracle.layers(8, (3,), 1, "int8")
    slot = gather_to_host(oracle.device(pools), _host(slots), [5, 0, 2], **how)
    runs = [Run(5, 0), Run(0, 1), Run(2, 2)]
    oracle.assert_equal(slot, oracle.copied(pools, slots, runs))


@both
def test_pages_may_repeat_on_the_way_out(how: dict[str, Any]) -> None:
    pools, slots = oracle.layers(4, _PAGE, 1), oracle.layers(3, _PAGE, 1, seed=1)
    slot = gather_to_host(oracle.device(pools), _host(slots), [2, 2, 1], **how)
    oracle.assert_equal(slot, [pools[0][[2, 2, 1]]])


@both
def test_nothing_to_copy(how: dict[str, Any]) -> None:
    pools, slots = oracle.layers(4, _PAGE, 1), oracle.layers(3, _PAGE, 1, seed=1)
    oracle.assert_equal(gather_to_host(oracle.device(pools), _host(slots), [0], 0, **how), slots)
    oracle.assert_equal(copy_to_device(_host(slots), oracle.device(pools), [0], 0, **how), pools)


@pytest.mark.parametrize("params", PARAMS, ids=params_id)
@pytest.mark.parametrize("window", [1, 3, 50])
def test_every_window(window: int, params: pltpu.InterpretParams) -> None:
    pools, slots = oracle.layers(4, _PAGE, 2), oracle.layers(3, _PAGE, 2, seed=1)
    arrays = oracle.device(pools), _host(slots)
    with watched(params):
        slot = gather_to_host(*arrays, [3, 0], window=window, interpret=params)
        jax.block_until_ready(slot)
    oracle.assert_equal(slot, oracle.copied(pools, slots, [Run(3, 0), Run(0, 1)]))


@both
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 128), dtype) for dtype in _DTYPES] + [((3, 5), "int8"), ((7,), "int8"), ((), "int8")],
    ids=str,
)
def test_whole_array(shape: tuple[int, ...], dtype: str, how: dict[str, Any]) -> None:
    (source,) = oracle.layers(1, shape, 1, dtype)
    (before,) = oracle.layers(1, shape, 1, dtype, seed=1)
    (dest,) = _host([before[0]])
    result = copy_to_host(jnp.array(source[0]), dest, **how)
    oracle.assert_equal([result], [source[0]])
    assert result.sharding.is_equivalent_to(_HOST, len(shape))
    assert dest.is_deleted()


@both
def test_sharded(how: dict[str, Any]) -> None:
    """Heads over two devices; every device copies its own part."""
    # The simulator keeps a thread of XLA's waiting for each device: no more than CPU cores.
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("x", "y"))
    device = NamedSharding(mesh, P(None, None, ("x", "y")))
    host = NamedSharding(mesh, P(None, None, ("x", "y")), memory_kind="pinned_host")
    pools, slots = oracle.layers(6, (4, 8, 128), 2), oracle.layers(3, (4, 8, 128), 2, seed=1)
    pool = [jax.device_put(array, device) for array in oracle.device(pools)]
    slot = [jax.device_put(array, host) for array in oracle.device(slots)]
    slot = gather_to_host(pool, slot, [5, 1, 99], 2, **how)
    expected = oracle.copied(pools, slots, [Run(5, 0), Run(1, 1)])
    oracle.assert_equal(slot, expected)
    assert all(array.sharding.is_equivalent_to(host, 4) for array in slot)
    pool = copy_to_device(slot, pool, [0, 3, 99], 2, **how)
    oracle.assert_equal(pool, oracle.copied(expected, pools, [Run(0, 0), Run(1, 3)]))
    assert all(array.sharding.is_equivalent_to(device, 4) for array in pool)


def test_slot_stays_where_it_is() -> None:
    """On CPU: the returned slot is the donated memory, so a pool of slots never grows."""
    pools, slots = oracle.layers(9, _PAGE, 2, "uint16"), oracle.layers(4, _PAGE, 2, "uint16")
    slot = _host(slots)
    before = [array.unsafe_buffer_pointer() for array in slot]
    for ids in ([1, 2, 3, 4], [5, 6, 7, 8]):
        donated = slot
        slot = gather_to_host(oracle.device(pools), donated, ids)
        assert [array.unsafe_buffer_pointer() for array in slot] == before
        assert all(array.is_deleted() for array in donated)


def test_pool_stays_where_it_is() -> None:
    pools, slots = oracle.layers(9, _PAGE, 2, "uint16"), oracle.layers(4, _PAGE, 2, "uint16")
    pool = oracle.device(pools)
    before = [array.unsafe_buffer_pointer() for array in pool]
    results = copy_to_device(_host(slots), pool, [8, 0, 3, 5])
    assert [array.unsafe_buffer_pointer() for array in results] == before


@both
def test_new_values_do_not_recompile(how: dict[str, Any]) -> None:
    pools, slots = oracle.layers(7, _PAGE, 1), oracle.layers(3, _PAGE, 1, seed=1)
    misses = set()
    for ids, count in (([1, 2, 3], 3), ([6, 0, 99], 2), ([4, 4, 4], 0), ([5, 5, 0], None)):
        pool, slot = oracle.device(pools), _host(slots)
        gather_to_host(pool, slot, ids, count, **how)
        misses.add(_compiled.cache_info().misses)
    assert len(misses) == 1


@both
def test_inside_a_jit(how: dict[str, Any]) -> None:
    """On CPU, with default memory kinds, everything may be traced."""
    pools, slots = oracle.layers(7, _PAGE, 2), oracle.layers(3, _PAGE, 2, seed=1)

    @functools.partial(jax.jit, donate_argnums=1)
    def out(pool: Any, slot: Any, ids: Any, count: Any) -> Any:
        return gather_to_host(pool, slot, ids, count, **how)

    ids = jnp.array([6, 0, 99], jnp.int32)
    slot = out(oracle.device(pools), oracle.device(slots), ids, jnp.int32(2))
    oracle.assert_equal(slot, oracle.copied(pools, slots, [Run(6, 0), Run(0, 1)]))


def test_completion_is_asked_of_the_arrays() -> None:
    pools, slots = oracle.layers(64, (16, 128), 4), oracle.layers(64, (16, 128), 4, seed=1)
    slot = gather_to_host(oracle.device(pools), _host(slots), list(range(64)))
    jax.block_until_ready(slot)
    assert all(cast(Any, array).is_ready() for array in slot)


def _pool(pages: int, page: tuple[int, ...] = _PAGE, dtype: Any = "float32") -> jax.Array:
    return jnp.zeros((pages, *page), dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_ids": [0, 9]}, r"page_ids\[1\] = 9 with chunk size 1 ends at page 10, but layer 1"),
        ({"page_ids": [0, -1]}, r"page_ids\[1\] = -1 is negative"),
        ({"page_ids": [[0]]}, r"page_ids must be 1-D, got shape \(1, 1\)"),
        ({"page_ids": []}, "chunk list is empty"),
        ({"page_ids": [0] * 5}, r"page_ids has 5 entries, slot_array\[1\] only 4 pages"),
        ({"num_pages": 3}, "num_chunks = 3 is not within 0..2"),
        ({"slot_array": [_pool(4)]}, "slot_array has 1 layers, pool_array has 2"),
        ({"slot_array": [], "pool_array": []}, "slot_array has 0 layers"),
        (
            {"slot_array": [_pool(6), _pool(4, (4, 64))]},
            r"slot_array\[1\] has pages float32\[4, 64\], pool_array\[1\] has float32\[4, 128\]",
        ),
        (
            {"slot_array": [_pool(6), _pool(4, dtype="int8")]},
            r"slot_array\[1\] has pages int8\[4, 128\]",
        ),
        ({"window": 0}, "window = 0 must be at least 1"),
        ({"checks": "device"}, "checks = 'device' is unknown"),
        ({"implementation": "cuda"}, "implementation = 'cuda' is unknown"),
        ({"sharding_spec": P("x")}, "shards the page axis"),
        ({"sharding_spec": [P()]}, "sharding_spec has 1 specs for 2 layers"),
    ],
)
@pytest.mark.parametrize("function", [gather_to_host, copy_to_device])
def test_bad_value(function: Any, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "slot_array": [_pool(6), _pool(4)],
        "pool_array": [_pool(12), _pool(9)],
        "page_ids": [0, 1],
    }
    with pytest.raises(ValueError, match=message):
        function(**{**arguments, **changes})


def test_pages_written_twice() -> None:
    with pytest.raises(ValueError, match="chunk 0 writes pages 2..2 and chunk 1 writes pages 2..2"):
        copy_to_device([_pool(4)], [_pool(9)], [2, 2])


@pytest.mark.parametrize(
    "dest", [_pool(4), _pool(5, dtype="bfloat16"), _pool(5, (4, 64))], ids=lambda x: str(x.shape)
)
def test_whole_array_of_another_kind(dest: jax.Array) -> None:
    with pytest.raises(ValueError, match=r"src is float32\[5, 4, 128\], dest is .* must be equal"):
        copy_to_host(_pool(5), dest)


def test_cut_differently() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    src = jax.device_put(_pool(4), NamedSharding(mesh, P(None, "x")))
    dest = jax.device_put(_pool(4), NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match=r"a device has \(4, 2, 128\) and \(4, 4, 128\)"):
        copy_to_host(src, dest)


def test_kernel_needs_a_tpu() -> None:
    with pytest.raises(NotImplementedError, match="copy_to_host: the Pallas kernel needs a TPU"):
        copy_to_host(_pool(1), _pool(1), implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="copy_to_device: the Pallas kernel needs a TPU"):
        copy_to_device([_pool(1)], [_pool(1)], [0], implementation="mosaic_tpu")


@pytest.mark.parametrize(("version", "launches"), [("0.0.42", 3), ("0.0.48.1", 3), ("0.0.49", 1)])
def test_old_compilers_get_one_launch_for_each_layer(
    version: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    dispatch.libtpu_version.cache_clear()
    pool, slot = [jnp.zeros((8, 16, 128))] * 3, [jnp.zeros((2, 16, 128))] * 3
    for to_host, src, dest, count in ((True, pool, slot, launches), (False, slot, pool, 1)):
        traced = jax.make_jaxpr(functools.partial(kernel.copy_pages, to_host=to_host))(
            src, dest, jnp.zeros(2, jnp.int32), jnp.ones(1, jnp.int32)
        )
        assert str(traced).count("= pallas_call[") == count
    dispatch.libtpu_version.cache_clear()
