# SPDX-License-Identifier: Apache-2.0
"""Tests of the checks that sampling parameters make on themselves."""

import math
from typing import Any

import pytest

from kvferry.engine.sampling_params import MAX_STOP_STRINGS, SamplingParams


def test_defaults_are_plain_sampling() -> None:
    params = SamplingParams()
    assert not params.greedy
    assert not params.changes_logits
    assert params.max_new_tokens is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1; it must be at least 0"),
        ({"min_new_tokens": -2}, "min_new_tokens is -2"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens is 5, more than .* 4"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be a 64-bit integer"),
        ({"logit_bias": {7: 101.0}}, r"logit_bias\[7\] is 101.0"),
        ({"stop": ("a", "")}, r"stop\[1\] is ''"),
        ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "the number of stop strings is 65"),
    ],
)
def test_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        {"top_k": 10**12},
        {"top_k": 0},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e9},
        {"seed": -(2**63)},
        {"logit_bias": {3: -100}},
        {"min_new_tokens": 4, "max_new_tokens": 4},
    ],
)
def test_accepts_the_limits(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


def test_containers_are_normalised() -> None:
    params: Any = SamplingParams
    params = params(stop="end", stop_token_ids=[1, 2], logit_bias={5: 1})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1}, True),
        ({"top_p": 1e-6}, False),
    ],
)
def test_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**fields).greedy is greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {0: 1.0}},
        {"min_new_tokens": 1},
    ],
)
def test_changes_logits(fields: dict[str, Any]) -> None:
    assert SamplingParams(**fields).changes_logits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": (3, 10)}, r"stop_token_ids has token id 10, .* \[0, 10\)"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has token id -1"),
    ],
)
def test_ids_outside_the_vocabulary(fields: dict[str, Any], message: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(ValueError, match=message):
        params.check_vocabulary(10)
    params_inside = SamplingParams(stop_token_ids=(9,), logit_bias={0: 1.0})
    params_inside.check_vocabulary(10)
