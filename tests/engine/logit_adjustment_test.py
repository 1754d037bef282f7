# SPDX-License-Identifier: Apache-2.0
"""Tests of penalties and bias against a direct reading of their definitions."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.engine.logit_adjustment import LogitAdjustment
from kvferry.engine.sampling_params import SamplingParams

VOCAB = 24
STOP_IDS = frozenset({3, 7})


def definition(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]
) -> npt.NDArray[np.float64]:
    """Token by token, as the documentation of the parameters words it."""
    adjusted = logits.astype(np.float64)
    for token in range(VOCAB):
        if token in prompt or token in output:
            rep = params.repetition_penalty
            adjusted[token] = (
                adjusted[token] / rep if adjusted[token] > 0 else adjusted[token] * rep
            )
        adjusted[token] += params.logit_bias.get(token, 0.0)
        adjusted[token] -= params.frequency_penalty * output.count(token)
        adjusted[token] -= params.presence_penalty * (token in output)
        if len(output) < params.min_new_tokens and token in STOP_IDS:
            adjusted[token] = -np.inf
    return adjusted


def apply(adjustment: LogitAdjustment, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    scaled = np.where(logits > 0, logits / adjustment.scale, logits * adjustment.scale)
    return scaled + adjustment.bias


CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"logit_bias": {1: 5.0, 3: -100.0}},
    {"min_new_tokens": 3},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.9,
        "logit_bias": {4: 2.0, 7: 1.0},
        "min_new_tokens": 2,
    },
]


@pytest.mark.parametrize("fields", CASES)
def test_follows_the_definition_at_every_length(fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(**fields)
    prompt, output = [1, 2, 2, 9], [int(token) for token in rng.integers(0, VOCAB, 12)]
    adjustment = LogitAdjustment(params, prompt, [], STOP_IDS, VOCAB)
    for length in range(len(output) + 1):
        logits = rng.normal(0, 3, VOCAB).astype(np.float32)
        expected = definition(logits, params, prompt, output[:length])
        np.testing.assert_allclose(apply(adjustment, logits), expected, rtol=1e-5, atol=1e-6)
        if length < len(output):
            adjustment.append(output[length])


@pytest.mark.parametrize("fields", CASES)
def test_rebuilt_equals_grown(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    output = [5, 5, 7, 3, 5, 1]
    grown = LogitAdjustment(params, [1, 2], [], STOP_IDS, VOCAB)
    for token in output:
        grown.append(token)
    rebuilt = LogitAdjustment(params, [1, 2], output, STOP_IDS, VOCAB)
    np.testing.assert_array_equal(grown.scale, rebuilt.scale)
    np.testing.assert_array_equal(grown.bias, rebuilt.bias)


def test_minimum_length_is_over_once_reached() -> None:
    params = SamplingParams(min_new_tokens=2, logit_bias={3: 1.5})
    adjustment = LogitAdjustment(params, [1], [], STOP_IDS, VOCAB)
    assert adjustment.bias[3] == adjustment.bias[7] == -np.inf
    adjustment.append(0)
    assert adjustment.bias[7] == -np.inf
    adjustment.append(0)
    assert (adjustment.bias[3], adjustment.bias[7]) == (1.5, 0.0)


def test_inactive_when_only_the_minimum_length_was_asked_for() -> None:
    adjustment = LogitAdjustment(SamplingParams(min_new_tokens=1), [1], [], STOP_IDS, VOCAB)
    assert adjustment.active
    adjustment.append(0)
    assert not adjustment.active
    assert not adjustment.bias.any()


def test_stop_ids_beyond_the_vocabulary_are_left_out() -> None:
    params = SamplingParams(min_new_tokens=1)
    adjustment = LogitAdjustment(params, [1], [], frozenset({VOCAB + 5, 2}), VOCAB)
    assert np.flatnonzero(adjustment.bias).tolist() == [2]
