# SPDX-License-Identifier: Apache-2.0
"""Tests of the sampling arithmetic against plain NumPy in double precision."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from kvferry.engine import sampling_ops
from kvferry.engine.sampling_ops import RowSettings
from kvferry.engine.sampling_params import MAX_TOP_LOGPROBS

VOCAB = 512

Floats = npt.NDArray[np.float32]

threshold = jax.jit(sampling_ops.filter_threshold)
sample = jax.jit(sampling_ops.sample_filtered)
full = jax.jit(sampling_ops.sample_full)


def candidates(row: Floats, top_k: int, top_p: float) -> npt.NDArray[np.bool_]:
    """The definition: few enough tokens, and little enough probability, are more likely."""
    order = np.argsort(-row, kind="stable")
    weights = np.exp(row[order].astype(np.float64) - row.max())
    probs = weights / weights.sum()
    above = np.concatenate([[0.0], np.cumsum(probs)[:-1]])
    # Equal logits have the same tokens above them: those of the first of them.
    first = np.searchsorted(-row[order], -row[order], side="left")
    keep_sorted = np.ones(len(row), bool)
    if top_k:
        keep_sorted &= first < top_k
    if top_p < 1.0:
        keep_sorted &= above[first] < top_p
    keep = np.empty(len(row), bool)
    keep[order] = keep_sorted
    return keep


def settings(num_rows: int, **columns: Any) -> RowSettings:
    floats = np.tile(np.array([1.0, 1.0, -np.inf], np.float32), (num_rows, 1))
    words = np.zeros((num_rows, 5), np.uint32)
    words[:, 2] = 1
    places: dict[str, tuple[npt.NDArray[Any], int]] = {
        "temperature": (floats, 0),
        "top_p": (floats, 1),
        "log_min_p": (floats, 2),
    }
    places |= {"top_k": (words, 0), "position": (words, 1), "sampled": (words, 2)}
    places |= {"seed_high": (words, 3), "seed": (words, 4)}
    for name, value in columns.items():
        array, column = places[name]
        array[:, column] = value
    return RowSettings(floats, words)


def draw_logits(rng: np.random.Generator, kind: str) -> Floats:
    logits = rng.normal(0, 3, VOCAB).astype(np.float32)
    if kind == "ties":
        logits = (np.round(logits * 2) / 2).astype(np.float32)
    elif kind == "flat":
        logits[:] = 1.5
    elif kind == "peak":
        logits[7] = 60.0
    elif kind == "masked":
        logits[rng.permutation(VOCAB)[: VOCAB - 5]] = -np.inf
    elif kind == "negative":
        logits -= 100.0
    return logits


@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "peak", "masked", "negative"])
def test_threshold_lets_exactly_the_candidates_through(kind: str) -> None:
    rng = np.random.default_rng(3)
    ks = [0, 1, 2, 7, 50, VOCAB - 1, VOCAB, 2**31 - 1]
    ps = [1.0, 0.9999, 0.95, 0.5, 0.1, 1e-3, 1e-7]
    cases = [(k, p) for k in ks for p in ps]
    rows = np.stack([draw_logits(rng, kind) for _ in cases])
    top_k = np.array([k for k, _ in cases], np.uint32)
    top_p = np.array([p for _, p in cases], np.float32)
    least = np.asarray(threshold(rows, top_k, top_p))
    exact = 0
    for row, (k, p), limit in zip(rows, cases, least, strict=True):
        # Between these two, single precision may decide either way.
        fewest, most = candidates(row, k, max(p - 1e-6, 1e-9)), candidates(row, k, p + 1e-6)
        chosen = row >= limit
        assert (fewest <= chosen).all() and (chosen <= most).all(), f"k={k} p={p}"
        exact += int((fewest == most).all())
    assert exact >= 0.8 * len(cases)


def test_top_p_stops_exactly_where_the_mass_is_reached() -> None:
    row = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    for top_p, kept in [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (0.9, 4)]:
        limit = threshold(row, np.zeros(1, np.uint32), np.array([top_p], np.float32))
        assert int((row >= np.asarray(limit)).sum()) == kept, top_p


def test_no_filter_gives_no_threshold() -> None:
    row = np.zeros((2, VOCAB), np.float32)
    limit = threshold(row, np.array([0, VOCAB], np.uint32), np.ones(2, np.float32))
    np.testing.assert_array_equal(limit, [-np.inf, -np.inf])


def expected_probabilities(
    row: Floats, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    scaled = row / np.float32(temperature)
    keep = candidates(scaled, top_k, top_p)
    if min_p:
        keep &= scaled >= scaled.max() + np.float32(np.log(min_p))
    weights = np.where(keep, np.exp(scaled.astype(np.float64) - scaled.max()), 0.0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (2.5, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 0, 1.0, 0.1),
        (1.5, 12, 0.9, 0.02),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    row = np.random.default_rng(5).normal(0, 2, 40).astype(np.float32)
    draws, batch = 20000, 1000
    logits = np.tile(row, (batch, 1))
    counts = np.zeros(row.size, int)
    for start in range(0, draws, batch):
        chosen = sample(
            logits,
            settings(
                batch,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                log_min_p=np.log(min_p) if min_p else -np.inf,
                seed=17,
                position=np.arange(start, start + batch),
            ),
        )
        counts += np.bincount(np.asarray(chosen.token_ids), minlength=row.size)
    probabilities = expected_probabilities(
        row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    assert not counts[probabilities == 0.0].any(), "a filtered token was chosen"
    # Cells too rare for the statistic are put together.
    order = np.argsort(probabilities)
    rare = order[np.cumsum(probabilities[order]) * draws < 10]
    common = np.setdiff1d(np.arange(row.size), rare)
    expected = np.append(probabilities[common], probabilities[rare].sum()) * draws
    observed = np.append(counts[common], counts[rare].sum())
    used = expected > 0
    statistic = (((observed - expected) ** 2)[used] / expected[used]).sum()
    freedom = int(used.sum()) - 1
    # Wilson and Hilferty's approximation of the 99.9 % quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, f"chi-square {statistic:.1f}, bound {bound:.1f}"


def test_rare_tokens_are_not_lost_in_the_noise() -> None:
    """A thousand tokens of 1e-6 each come up as often as they should: one draw in a thousand."""
    rare, draws, batch = 1000, 60_000, 2000
    row = np.zeros(rare + 1, np.float32)
    row[1:] = np.log(1e-6)
    logits = np.tile(row, (batch, 1))
    hits = 0
    for seed in range(draws // batch):
        every = settings(batch, seed=seed, position=np.arange(batch))
        hits += int(np.count_nonzero(sample(logits, every).token_ids))
    expected = draws * 1e-3
    assert abs(hits - expected) < 4 * np.sqrt(expected)


def test_noise_depends_on_seed_and_position_only() -> None:
    rng = np.random.default_rng(1)
    row = rng.normal(0, 1, VOCAB).astype(np.float32)

    def alone(seed: int, position: int) -> int:
        result = sample(row[None], settings(1, seed=seed, position=position))
        return int(result.token_ids[0])

    size = 8
    for place in (0, 3, 7):
        logits = rng.normal(0, 1, (size, VOCAB)).astype(np.float32)
        seeds, positions = np.arange(size) + 40, np.arange(size) * 3
        logits[place] = row
        chosen = sample(logits, settings(size, seed=seeds, position=positions)).token_ids
        assert int(chosen[place]) == alone(40 + place, 3 * place)
    assert len({alone(1, position) for position in range(20)}) > 10
    assert len({alone(seed, 1) for seed in range(20)}) > 10
    high = sample(row[None], settings(1, seed=1, seed_high=9, position=0)).token_ids
    low = sample(row[None], settings(1, seed=1, seed_high=0, position=0)).token_ids
    assert int(high[0]) != int(low[0]), "both halves of the seed count"


def test_greedy_rows_in_a_sampled_batch() -> None:
    logits = np.random.default_rng(2).normal(0, 1, (8, VOCAB)).astype(np.float32)
    mixed = settings(8, seed=3, sampled=np.arange(8) % 2)
    chosen = np.asarray(sample(logits, mixed).token_ids)
    best = np.argmax(logits, axis=1)
    np.testing.assert_array_equal(chosen[::2], best[::2])
    assert (chosen[1::2] != best[1::2]).any()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [30, 9, 200]] = 4.0
    logits[1, VOCAB - 1] = 1.0
    np.testing.assert_array_equal(
        sampling_ops.sample_greedy(jax.device_put(logits)).token_ids, [9, VOCAB - 1]
    )


def test_tiny_top_p_is_greedy_but_for_ties() -> None:
    logits = np.random.default_rng(4).normal(0, 1, (8, VOCAB)).astype(np.float32)
    every = settings(8, top_p=1e-9, seed=np.arange(8))
    np.testing.assert_array_equal(sample(logits, every).token_ids, np.argmax(logits, axis=1))
    logits[:, [3, 300]] = 9.0
    drawn = [
        np.asarray(
            sample(logits, settings(8, top_p=1e-9, seed=seed, position=np.arange(8))).token_ids
        )
        for seed in range(8)
    ]
    assert set(np.concatenate(drawn).tolist()) == {3, 300}


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 5, (8, VOCAB)).astype(np.float32)
    double = logits.astype(np.float64)
    reference = double - np.log(np.exp(double).sum(axis=1, keepdims=True))
    scale = rng.uniform(0.5, 2.0, logits.shape).astype(np.float32)
    bias = rng.normal(0, 3, logits.shape).astype(np.float32)
    result = full(logits, settings(8, temperature=0.5, seed=1), scale, bias)
    tokens = np.asarray(result.token_ids)
    np.testing.assert_allclose(
        result.logprobs, reference[np.arange(8), tokens], rtol=1e-5, atol=1e-5
    )
    assert result.top_ids is not None and result.top_logprobs is not None
    best = np.argsort(-logits, axis=1)[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(result.top_ids, best)
    np.testing.assert_allclose(
        result.top_logprobs, np.take_along_axis(reference, best, 1), rtol=1e-5, atol=1e-5
    )


def test_full_applies_scale_and_bias_before_choosing() -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (8, VOCAB)).astype(np.float32)
    scale = rng.uniform(0.5, 3.0, logits.shape).astype(np.float32)
    bias = rng.normal(0, 5, logits.shape).astype(np.float32)
    bias[:, ::3] = -np.inf
    adjusted = np.where(logits > 0, logits / scale, logits * scale) + bias
    greedy = full(logits, settings(8, sampled=0), scale, bias)
    np.testing.assert_array_equal(greedy.token_ids, np.argmax(adjusted, axis=1))
    every = settings(8, seed=np.arange(8), temperature=2.0, top_k=3)
    sampled = np.asarray(full(logits, every, scale, bias).token_ids)
    assert (sampled % 3 != 0).all(), "a forbidden token was chosen"
    best_three = np.argsort(-adjusted, axis=1)[:, :3]
    assert (sampled[:, None] == best_three).any(axis=1).all()


def test_without_adjustments_full_chooses_like_sample() -> None:
    logits = np.random.default_rng(8).normal(0, 1, (8, VOCAB)).astype(np.float32)
    every = settings(8, seed=np.arange(8), top_p=0.9)
    neutral = full(logits, every, np.ones_like(logits), np.zeros_like(logits))
    np.testing.assert_array_equal(neutral.token_ids, sample(logits, every).token_ids)


def test_everything_forbidden_still_ends() -> None:
    logits = np.zeros((8, VOCAB), np.float32)
    forbidden = np.full_like(logits, -np.inf)
    result = full(logits, settings(8, top_p=0.5, top_k=3), np.ones_like(logits), forbidden)
    assert 0 <= int(result.token_ids[0]) < VOCAB
