# SPDX-License-Identifier: Apache-2.0
"""Parts of the forward step; whole models are compared with transformers in correctness_test."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvferry.engine.attention_plan import AttentionPlan, Family
from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.engine.model import ForwardPlan, StepInputs, forward, project_logits, rms_norm
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.step_inputs import Chunk, StepShape, pack, unpack
from kvferry.engine.weights import Params
from kvferry.tests.engine.tiny import tiny_config, tiny_params

PAGE_SIZE, NUM_PAGES = 4, 8


def run_step(
    config: ModelConfig, params: Params, chunks: list[Chunk], family: Family, tokens: int
) -> tuple[np.ndarray, np.ndarray, list[jax.Array]]:
    """Runs one step on an empty pool."""
    layout = KVPoolLayout.for_model(
        config, page_size=PAGE_SIZE, dtype=str(params["embed"].dtype), platform="cpu"
    )
    plan = ForwardPlan(
        attention=AttentionPlan(
            sm_scale=config.head_dim**-0.5, layout=layout, family=family, implementation="xla"
        )
    )
    shape = StepShape(family, tokens, tokens if family == "decode" else 2, NUM_PAGES)
    token_ids, packed = pack(shape, chunks, PAGE_SIZE, NUM_PAGES)
    inputs = unpack(shape, jnp.asarray(token_ids), jnp.asarray(packed))
    pool = [
        jnp.zeros((NUM_PAGES, *layout.page_shape), layout.storage_dtype)
        for _ in range(config.num_layers)
    ]

    @jax.jit
    def step(params: Params, pool: list[jax.Array], inputs: StepInputs) -> tuple[object, ...]:
        return forward(params, config, pool, inputs, plan=plan)

    hidden, logits, pool = step(params, pool, inputs)
    return np.asarray(hidden), np.asarray(logits), pool


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rms_norm_works_in_float32(dtype: type) -> None:
    rng = np.random.default_rng(0)
    # Squares that bfloat16 could not sum.
    x: np.ndarray = (100 * rng.standard_normal((3, 512))).astype(dtype)
    weight: np.ndarray = rng.uniform(0.5, 2.0, 512).astype(dtype)
    out = rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5)
    assert out.dtype == dtype
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)
    tolerance = 1e-6 if dtype == np.float32 else 1e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_come_from_the_right_table_without_padding(tied: bool) -> None:
    config = tiny_config(vocab_size=10, tie_embeddings=tied)
    rng = np.random.default_rng(0)
    tables = {
        name: rng.standard_normal((12, 32), np.float32)  # padded, as tensor parallelism may
        for name in ("embed", "lm_head")
    }
    hidden = rng.standard_normal((3, 32), np.float32)
    logits = project_logits(jax.tree.map(jnp.asarray, tables), config, jnp.asarray(hidden), None)
    assert logits.dtype == jnp.float32
    expected = hidden @ tables["embed" if tied else "lm_head"][:10].T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_logits_are_those_of_the_last_rows() -> None:
    config = tiny_config()
    params = tiny_params(config)
    chunks = [Chunk([5, 6, 7], 0, [3]), Chunk([9], 0, [1])]
    hidden, logits, _ = run_step(config, params, chunks, "prefill", 8)
    expected = hidden[[2, 3]] @ params["lm_head"].T
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_only_the_slots_of_the_new_tokens_are_written() -> None:
    config = tiny_config()
    chunks = [Chunk([5, 6, 7, 8, 9], 0, [3, 6])]
    _, _, pool = run_step(config, tiny_params(config), chunks, "prefill", 8)
    for array in pool:
        written = np.asarray(array).any((2, 3))
        expected = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
        expected[3], expected[6, 0] = True, True
        np.testing.assert_array_equal(written, expected)


def test_both_families_give_the_same_step() -> None:
    config = tiny_config(qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True)
    params = tiny_params(config)
    chunks = [Chunk([5], 0, [3]), Chunk([6], 0, [2])]
    _, prefill, _ = run_step(config, params, chunks, "prefill", 8)
    _, decode, _ = run_step(config, params, chunks, "decode", 4)
    np.testing.assert_allclose(decode[:2], prefill, rtol=1e-5, atol=1e-5)


def test_padding_rows_stay_finite() -> None:
    config = tiny_config()
    hidden, logits, _ = run_step(config, tiny_params(config), [Chunk([5], 0, [3])], "decode", 4)
    assert np.isfinite(hidden).all()
    assert np.isfinite(logits).all()


def test_a_bfloat16_step_is_close_to_the_float32_one() -> None:
    config = tiny_config()
    params = tiny_params(config)
    narrow = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), params)
    chunks = [Chunk(list(range(7)), 0, [3, 4])]
    _, exact, _ = run_step(config, params, chunks, "prefill", 8)
    hidden, rounded, _ = run_step(config, narrow, chunks, "prefill", 8)
    assert hidden.dtype == ml_dtypes.bfloat16
    assert rounded.dtype == np.float32
    assert np.corrcoef(exact[0], rounded[0])[0, 1] > 0.99
