# SPDX-License-Identifier: Apache-2.0
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.engine.attention import ragged_paged_attention, write_kv
from kvferry.engine.attention_plan import AttentionPlan, Family
from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.tests.engine.paged_batch import PagedBatch

SCALE = 0.3
DECODE_LENGTHS = {
    "one token": [1],
    "page edges": [15, 16, 17, 32],
    "block edges": [127, 128, 129, 255, 256, 257],
    "one long, many short": [700, 1, 1, 3, 5, 1, 2],
    "many blocks": [1000, 517],
}
PREFILL_LENGTHS = {
    "one token": [(1, 1)],
    "whole prompt": [(40, 40)],
    "page edges": [(15, 15), (16, 16), (17, 17)],
    "later chunks": [(32, 96), (16, 272), (7, 519)],
    "more rows than a block": [(300, 300)],
    "first long, then short": [(270, 530), (1, 1), (2, 600), (30, 30)],
    "decode rows between": [(1, 400), (50, 50), (1, 3)],
}


def layout_of(batch: PagedBatch, dtype: str = "float32") -> KVPoolLayout:
    _, page_size, combined, head_dim = batch.kv_pages.shape
    return KVPoolLayout(
        num_layers=1,
        page_size=page_size,
        kv_heads=combined // 2,
        head_dim=head_dim,
        dtype=dtype,
        storage_dtype=dtype if dtype == "float32" else f"uint{8 * jnp.dtype(dtype).itemsize}",
        padded_kv_heads=combined // 2,
        padded_head_dim=head_dim,
    )


def attend(
    batch: PagedBatch, family: Family, layout: KVPoolLayout | None = None
) -> Callable[..., jax.Array]:
    return jax.jit(
        functools.partial(
            ragged_paged_attention,
            plan=AttentionPlan(
                sm_scale=SCALE,
                layout=layout or layout_of(batch),
                family=family,
                implementation="xla",
            ),
        )
    )


def check(batch: PagedBatch, family: Family) -> None:
    out = np.asarray(attend(batch, family)(*batch.arguments))
    np.testing.assert_allclose(out[: batch.used_rows], batch.dense(SCALE), rtol=2e-5, atol=2e-5)
    assert np.isfinite(out).all(), "padding rows must stay finite"


@pytest.mark.parametrize("name", DECODE_LENGTHS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1)])
def test_decode_equals_dense_attention(name: str, heads: tuple[int, int]) -> None:
    check(PagedBatch.random([(1, n) for n in DECODE_LENGTHS[name]], heads=heads), "decode")


@pytest.mark.parametrize("name", PREFILL_LENGTHS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1)])
def test_prefill_equals_dense_attention(name: str, heads: tuple[int, int]) -> None:
    check(PagedBatch.random(PREFILL_LENGTHS[name], heads=heads), "prefill")


@pytest.mark.parametrize("page_size", [1, 4, 48, 512])
def test_any_page_size(page_size: int) -> None:
    check(PagedBatch.random([(1, 70), (1, 600)], page_size=page_size), "decode")
    check(PagedBatch.random([(30, 70), (5, 600)], page_size=page_size), "prefill")


def test_padding_sequences_and_rows_change_nothing() -> None:
    check(PagedBatch.random([(1, 70), (1, 5), (1, 300)], rows=8, sequences=8), "decode")
    check(PagedBatch.random([(30, 70), (5, 300)], rows=64, sequences=8), "prefill")


def test_a_step_of_only_padding_is_finite() -> None:
    batch = PagedBatch.random([(1, 1)], rows=4, sequences=4)
    batch.kv_lens[:], batch.cu_q_lens[:], batch.num_seqs[:] = 0, 0, 0
    for family in ("decode", "prefill"):
        assert np.isfinite(np.asarray(attend(batch, family)(*batch.arguments))).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_pool_of_bits_is_read_as_its_dtype(dtype: str) -> None:
    batch = PagedBatch.random([(1, 70), (1, 5), (1, 300)])
    bits, rounded = batch.stored(dtype)
    arguments = (batch.q, bits, *batch.arguments[2:])
    families: tuple[Family, ...] = ("decode", "prefill")
    for family in families:
        out = attend(batch, family, layout_of(batch, dtype))(*arguments)
        np.testing.assert_allclose(out, rounded.dense(SCALE), rtol=2e-5, atol=2e-5)


def test_one_compilation_serves_every_length() -> None:
    function = attend(PagedBatch.random([(1, 1)]), "decode")
    for total in (3, 200, 700):
        batch = PagedBatch.random([(1, total)], seed=total)
        tables = np.zeros((1, 64), np.int32)
        tables[:, : batch.page_indices.shape[1]] = batch.page_indices
        pool = np.full((64, *batch.kv_pages.shape[1:]), np.nan, np.float32)
        pool[: len(batch.kv_pages)] = batch.kv_pages
        batch.page_indices, batch.kv_pages = tables, pool
        out = function(*batch.arguments)
        np.testing.assert_allclose(out, batch.dense(SCALE), rtol=2e-5, atol=2e-5)
    assert function._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_write_kv_puts_rows_in_their_slots_and_drops_padding(dtype: str) -> None:
    rng = np.random.default_rng(0)
    batch = PagedBatch.random([(1, 30)], heads=(6, 3))
    layout = layout_of(batch, dtype)
    pool = jnp.zeros(batch.kv_pages.shape, layout.storage_dtype)
    num_slots = pool.shape[0] * pool.shape[1]
    k, v = rng.standard_normal((2, 4, 3, 8), np.float32)
    slots = np.array([17, 0, num_slots, num_slots], np.int32)
    keys, values = jnp.asarray(k), jnp.asarray(v)
    pool = write_kv(pool, keys, values, jnp.asarray(slots), layout)
    written = np.array(pool).view(jnp.dtype(dtype))
    rows = written.reshape(num_slots, 6, 8).astype(np.float32)
    for row, slot in ((0, 17), (1, 0)):
        expected = np.stack([k[row], v[row]], axis=1).reshape(6, 8).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(rows[slot], expected.astype(np.float32))
        rows[slot] = 0
    assert not rows.any()


def test_write_kv_pads_heads_and_dimensions_with_zeros() -> None:
    layout = KVPoolLayout(
        num_layers=1,
        page_size=2,
        kv_heads=3,
        head_dim=8,
        dtype="float32",
        storage_dtype="float32",
        padded_kv_heads=4,
        padded_head_dim=16,
    )
    pool = jnp.ones((2, *layout.page_shape), jnp.float32)
    k, v = jnp.full((1, 3, 8), 5.0), jnp.full((1, 3, 8), 7.0)
    row = np.asarray(write_kv(pool, k, v, jnp.array([2]), layout))[1, 0]
    assert (row[0:6:2, :8] == 5).all()
    assert (row[1:6:2, :8] == 7).all()
    assert not row[6:].any()
    assert not row[:, 8:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_write_and_read_leave_the_pool_in_place(dtype: str) -> None:
    batch = PagedBatch.random([(1, 70), (1, 300)])
    layout = layout_of(batch, dtype)
    pool = jax.ShapeDtypeStruct((4096, *batch.kv_pages.shape[1:]), layout.storage_dtype)
    kv = jax.ShapeDtypeStruct((2, 2, 8), jnp.float32)
    families: tuple[Family, ...] = ("decode", "prefill")
    for family in families:

        def step(
            pool: jax.Array,
            k: jax.Array,
            v: jax.Array,
            slots: jax.Array,
            q: jax.Array,
            *tables: jax.Array,
            family: Family = family,
        ) -> tuple[jax.Array, jax.Array]:
            pool = write_kv(pool, k, v, slots, layout)
            return attend(batch, family, layout)(q, pool, *tables), pool

        slots = jax.ShapeDtypeStruct((2,), jnp.int32)
        rest = (batch.q, *batch.arguments[2:])
        compiled = jax.jit(step, donate_argnums=0).lower(pool, kv, kv, slots, *rest).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        pool_bytes = int(np.prod(pool.shape)) * pool.dtype.itemsize
        assert memory.alias_size_in_bytes >= pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 4
        shape = re.escape(f"[{','.join(map(str, pool.shape))}]")
        assert not re.search(rf"{shape}\S* (copy|convert)\(", compiled.as_text() or "")
