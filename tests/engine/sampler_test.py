# SPDX-License-Identifier: Apache-2.0
"""Tests of how a batch reaches the compiled variants, and of their speed at a real vocabulary."""

import collections
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvferry.engine.logit_adjustment import LogitAdjustment
from kvferry.engine.sampler import VARIANTS, Sampler, SamplingRow, Variant, row_settings
from kvferry.engine.sampling_ops import Samples
from kvferry.engine.sampling_params import SamplingParams

VOCAB = 300


def row(seed: int = 0, position: int = 0, top_logprobs: bool = False, **fields: Any) -> SamplingRow:
    params = SamplingParams(**fields)
    adjustment = None
    if params.changes_logits:
        adjustment = LogitAdjustment(params, [1, 2, 3], [], frozenset({5}), VOCAB)
    return SamplingRow(params, seed, position, adjustment, top_logprobs)


def draw(num_rows: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (num_rows, VOCAB)).astype(np.float32)


def choose(
    sampler: Sampler, logits: npt.NDArray[np.float32], rows: Sequence[SamplingRow | None]
) -> Samples:
    return sampler.sample(jax.device_put(logits), rows)


@pytest.fixture(name="sampler", scope="module")
def _sampler() -> Sampler:
    return Sampler(VOCAB)


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"top_k": 1}, "greedy"),
        ({}, "sample"),
        ({"temperature": 0.0, "top_logprobs": True}, "full"),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, "full"),
        ({"min_new_tokens": 2}, "full"),
    ],
)
def test_least_variant(fields: dict[str, Any], variant: Variant) -> None:
    assert row(**fields).variant == variant


def test_variant_falls_back_when_the_adjustment_is_over() -> None:
    waiting = row(min_new_tokens=1)
    assert waiting.adjustment is not None
    waiting.adjustment.append(9)
    assert waiting.variant == "sample"


def test_row_settings() -> None:
    rows = [
        None,
        row(seed=(7 << 32) | 9, position=55, top_k=3, top_p=0.25, min_p=0.5, temperature=2.0),
        row(temperature=0.0, top_p=0.1),
        row(top_k=10**12),
    ]
    floats, words = row_settings(rows, 5)
    np.testing.assert_allclose(floats[1], [2.0, 0.25, np.log(0.5)], rtol=1e-6)
    np.testing.assert_array_equal(words[1], [3, 55, 1, 7, 9])
    for unused in (0, 2, 4):
        np.testing.assert_array_equal(floats[unused], [1.0, 1.0, -np.inf])
        np.testing.assert_array_equal(words[unused], np.zeros(5))
    assert words[3, 0] == 2**31 - 1


def test_a_row_is_the_same_in_every_batch_and_variant(sampler: Sampler) -> None:
    logits = draw(4)
    mine = row(seed=123, position=77, top_p=0.95, temperature=1.2)
    alone = int(choose(sampler, logits[3:], [mine]).token_ids[0])
    neighbours: list[list[SamplingRow | None]] = [
        [row(seed=i) for i in range(3)],
        [row(temperature=0.0)] * 3,
        [row(seed=i, frequency_penalty=1.0, top_k=4) for i in range(3)],
        [None] * 3,
        [row(seed=i, top_logprobs=True) for i in range(3)],
    ]
    for rows in neighbours:
        assert int(choose(sampler, logits, [*rows, mine]).token_ids[3]) == alone
    fewer = choose(sampler, logits[[3, 0, 1, 2]], [mine])
    assert int(fewer.token_ids[0]) == alone, "padding rows do not matter"


def test_each_row_has_its_own_adjustment(sampler: Sampler) -> None:
    logits = draw(4)
    best = np.argmax(logits, axis=1)
    rows = [
        row(temperature=0.0),
        row(temperature=0.0, logit_bias={11: 100.0}),
        row(temperature=0.0, logit_bias={int(best[2]): -100.0}),
    ]
    tokens = np.asarray(choose(sampler, logits, rows).token_ids)
    second = np.argsort(-logits[2])[1]
    np.testing.assert_array_equal(tokens[:3], [best[0], 11, second])


def test_bias_against_everything_leaves_the_order(sampler: Sampler) -> None:
    logits = draw(4)
    everything = {token: -100.0 for token in range(VOCAB)}
    tokens = choose(sampler, logits, [row(temperature=0.0, logit_bias=everything)]).token_ids
    assert int(tokens[0]) == np.argmax(logits[0])


def test_tokens_beyond_the_vocabulary_are_never_chosen(sampler: Sampler) -> None:
    logits = np.concatenate([draw(4), np.full((4, 20), 50.0, np.float32)], axis=1)
    for rows in ([row(temperature=0.0)] * 4, [row()] * 4, [row(top_logprobs=True)] * 4):
        samples = choose(sampler, logits, rows)
        assert (np.asarray(samples.token_ids) < VOCAB).all()
        if samples.top_ids is not None:
            assert (np.asarray(samples.top_ids) < VOCAB).all()


def test_too_many_rows(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="3 rows to sample, but logits for 2"):
        choose(sampler, draw(2), [None] * 3)


def test_nothing_is_traced_after_warm_up() -> None:
    sampler = Sampler(VOCAB)
    sampler.warm_up(jax.device_put(draw(4)))
    assert sampler.num_traces == len(VARIANTS)
    for rows in (
        [row(temperature=0.0)],
        [row(seed=1, top_k=5), row(seed=2, top_p=0.3)],
        [row(min_new_tokens=3), None, row(repetition_penalty=2.0), row(top_logprobs=True)],
    ):
        choose(sampler, draw(4), rows).token_ids.block_until_ready()
    assert sampler.num_traces == len(VARIANTS)


def test_logits_split_over_devices_give_the_same_tokens(sampler: Sampler) -> None:
    logits = draw(4)
    rows = [row(seed=1, top_p=0.9), row(temperature=0.0), row(seed=2, frequency_penalty=1.0)]
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tp")))
    expected, found = choose(sampler, logits, rows), sampler.sample(split, rows)
    np.testing.assert_array_equal(found.token_ids[:3], expected.token_ids[:3])
    np.testing.assert_allclose(found.logprobs[:3], expected.logprobs[:3], atol=1e-5)


@pytest.mark.slow
def test_speed_at_a_real_vocabulary() -> None:
    """Choosing eight tokens among 49152 takes a fraction of sorting their logits once."""
    vocab, batch = 49152, 8
    sampler = Sampler(vocab)
    logits = jax.device_put(
        np.random.default_rng(0).normal(0, 4, (batch, vocab)).astype(np.float32)
    )
    sort = jax.jit(jnp.sort)
    cases: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "sample": {},
        "filter": {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
        "full": {"top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    }
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(8):  # in turns, so that other load on the machine hits all alike
        start = time.perf_counter()
        jax.block_until_ready(sort(logits))
        seconds["sort"].append(time.perf_counter() - start)
        for name, fields in cases.items():
            params = SamplingParams(**fields)
            adjustment = LogitAdjustment(params, list(range(500)), [], frozenset(), vocab)
            rows = [SamplingRow(params, seed, 9, adjustment) for seed in range(batch)]
            start = time.perf_counter()
            jax.device_get(sampler.sample(logits, rows))
            seconds[name].append(time.perf_counter() - start)
    best = {name: min(times) for name, times in seconds.items()}
    print({name: f"{time * 1e3:.2f} ms" for name, time in best.items()})
    for name in cases:
        assert best[name] < best["sort"] / 3, f"{name}: {best}"
