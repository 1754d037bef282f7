# SPDX-License-Identifier: Apache-2.0
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kvferry.engine.kv_pool import KVPool, page_buckets
from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.engine.sharding import TP_AXIS
from kvferry.tests.engine.tiny import tiny_config

PAGES, PAGE_SIZE = 24, 4


def make_pool(**changes: Any) -> KVPool:
    config = tiny_config(num_layers=3, num_kv_heads=2)
    options: dict[str, Any] = {"num_pages": PAGES, "page_size": PAGE_SIZE, "dtype": "float32"}
    return KVPool.create(config, **options | changes)


def fill(pool: KVPool, seed: int = 0) -> list[np.ndarray]:
    """Puts different random bits into every layer, and returns them."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(pool.layout.storage_dtype)
    shape = (pool.num_pages, *pool.layout.page_shape)
    values = [rng.integers(0, 100, shape).astype(dtype) for _ in range(pool.layout.num_layers)]
    # Memory shared with NumPy could not be overwritten in place.
    pool.arrays = [jax.device_put(value, pool.sharding, may_alias=False) for value in values]
    return values


@pytest.mark.parametrize("max_pages", [1, 2, 3, 5, 7, 100, 512])
def test_buckets_waste_at_most_a_third(max_pages: int) -> None:
    buckets = page_buckets(max_pages)
    assert buckets[-1] == max_pages
    assert list(buckets) == sorted(set(buckets))
    for count in range(1, max_pages + 1):
        bucket = min(size for size in buckets if size >= count)
        assert bucket - count <= bucket / 3


def test_buckets_are_the_documented_ones() -> None:
    assert page_buckets(40) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)


def test_a_cpu_pool_has_the_sizes_of_the_model() -> None:
    pool = make_pool()
    assert [array.shape for array in pool.arrays] == [(PAGES, PAGE_SIZE, 4, 8)] * 3
    assert pool.page_bytes == 3 * PAGE_SIZE * 4 * 8 * 4
    assert not any(np.asarray(array).any() for array in pool.arrays)


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "uint16"),
        ("float8_e4m3fn", "uint8"),
        ("float8_e5m2", "uint8"),
    ],
)
def test_a_cpu_pool_holds_bits_where_xla_would_convert(dtype: str, storage: str) -> None:
    pool = make_pool(dtype=dtype)
    assert pool.layout.dtype == dtype
    assert {str(array.dtype) for array in pool.arrays} == {storage}


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "shards", "padded"),
    [
        (3, 64, "bfloat16", 1, (4, 128)),
        (8, 128, "bfloat16", 4, (8, 128)),
        (8, 128, "bfloat16", 1, (8, 128)),
        (8, 128, "float8_e4m3fn", 4, (8, 128)),
        (4, 80, "float32", 4, (4, 128)),
        (5, 256, "bfloat16", 1, (8, 256)),
    ],
)
def test_a_tpu_pool_is_padded_to_what_the_kernel_tiles(
    heads: int, head_dim: int, dtype: str, shards: int, padded: tuple[int, int]
) -> None:
    config = tiny_config(num_q_heads=2 * heads, num_kv_heads=heads, head_dim=head_dim)
    layout = KVPoolLayout.for_model(
        config, page_size=16, dtype=dtype, platform="tpu", shards=shards
    )
    assert (layout.padded_kv_heads, layout.padded_head_dim) == padded
    assert (layout.kv_heads, layout.head_dim) == (heads, head_dim)
    assert layout.storage_dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_ids", [[5], [7, 0, 23], [3, 2, 1, 4, 9]])
def test_pages_survive_a_gather_and_a_scatter(dtype: str, page_ids: list[int]) -> None:
    source, target = make_pool(dtype=dtype), make_pool(dtype=dtype)
    before, old = fill(source), fill(target, seed=1)
    gathered = source.gather(page_ids)
    assert [(x.shape, x.dtype) for x in gathered] == [
        (spec.shape, spec.dtype) for spec in source.specs(len(page_ids))
    ]
    destination = [page_id ^ 1 for page_id in page_ids]
    target.scatter(gathered, destination)
    for layer in range(3):
        expected = old[layer]
        expected[destination] = before[layer][page_ids]
        np.testing.assert_array_equal(np.asarray(target.arrays[layer]), expected)
        np.testing.assert_array_equal(np.asarray(source.arrays[layer]), before[layer])


def test_a_scatter_is_in_place() -> None:
    pool = make_pool()
    pool.scatter(pool.gather([0]), [1])
    addresses = [array.unsafe_buffer_pointer() for array in pool.arrays]
    pool.scatter(pool.gather([1, 2]), [3, 4])
    assert [array.unsafe_buffer_pointer() for array in pool.arrays] == addresses


def test_pages_of_a_split_pool_stay_split() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), (TP_AXIS,))
    pool = make_pool(mesh=mesh)
    before = fill(pool)
    gathered = pool.gather([4, 2])
    assert gathered[0].sharding == pool.sharding
    assert gathered[0].addressable_shards[0].data.shape == (2, PAGE_SIZE, 2, 8)
    pool.scatter(gathered, [0, 1])
    np.testing.assert_array_equal(np.asarray(pool.arrays[2])[:2], before[2][[4, 2]])


def test_warm_up_leaves_nothing_to_trace() -> None:
    pool = make_pool(max_copy_pages=4)
    tasks = pool.warm_up_tasks(("gather", "scatter"))
    assert len({label for label, _ in tasks}) == 8
    for _, task in tasks:
        task()
    traces = pool.num_traces
    for count in range(1, 5):
        pool.scatter(pool.gather(range(count)), range(count))
    assert pool.num_traces == traces == 8


@pytest.mark.parametrize("page_ids", [[-1], [PAGES], [0, PAGES + 7]])
def test_pages_outside_of_the_pool_are_refused(page_ids: list[int]) -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match=rf"page ids must be in \[0, {PAGES}\)"):
        pool.gather(page_ids)


def test_wrong_copies_are_refused() -> None:
    pool = make_pool(max_copy_pages=4)
    with pytest.raises(ValueError, match="one copy moves 1 to 4 pages, got 0"):
        pool.gather([])
    with pytest.raises(ValueError, match="one copy moves 1 to 4 pages, got 5"):
        pool.gather(range(5))
    with pytest.raises(ValueError, match=r"must differ, got \[2, 2\]"):
        pool.scatter(pool.gather([0, 1]), [2, 2])
    with pytest.raises(ValueError, match="arrays for 3 layers, got 2"):
        pool.scatter(pool.gather([0])[:2], [1])
    with pytest.raises(ValueError, match=r"layer 0: expected float32\[1, 4, 4, 8\], got"):
        pool.scatter(pool.gather([0, 1]), [1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages must be positive, got 0"),
        ({"page_size": 0}, "page_size must be positive, got 0"),
        ({"max_copy_pages": 0}, "max_pages must be positive, got 0"),
        ({"dtype": "int8"}, "KV dtype must be one of .*, got 'int8'"),
    ],
)
def test_unusable_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool(**changes)


def test_heads_that_cannot_be_split_are_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:3]), (TP_AXIS,))
    with pytest.raises(ValueError, match="cannot split 2 KV heads over 3 devices"):
        make_pool(mesh=mesh)
