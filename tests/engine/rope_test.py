# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from kvferry.engine.errors import ModelError
from kvferry.engine.rope import RopeConfig, inverse_frequencies
from kvferry.tests.engine.checkpoints import read_data

_CASES: list[dict[str, Any]] = read_data("rope.json")["cases"]
# Two roundings of float32: NumPy's and torch's power functions differ in the last place.
_ROUNDING = 2.5e-7


@pytest.mark.parametrize("case", _CASES, ids=lambda case: _label(case["config"]))
def test_matches_transformers(case: dict[str, Any]) -> None:
    rope = RopeConfig.from_hf(case["config"])
    frequencies, factor = inverse_frequencies(rope, case["head_dim"])
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, case["inv_freq"], rtol=_ROUNDING)
    assert factor == pytest.approx(case["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: _label(case["config"]))
def test_old_form_of_the_configuration(case: dict[str, Any]) -> None:
    config = dict(case["config"])
    scaling = dict(config.pop("rope_parameters"))
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    new_form = RopeConfig.from_hf(case["config"])
    assert RopeConfig.from_hf(config | {"rope_scaling": scaling}) == new_form


def test_frequency_divisors_carry_the_llama3_scaling() -> None:
    """GGUF files hold the divisors instead of the parameters of the scaling."""
    (case, *_) = (c for c in _CASES if c["config"]["rope_parameters"]["rope_type"] == "llama3")
    scaled = RopeConfig.from_hf(case["config"])
    plain = RopeConfig(theta=scaled.theta)
    divisors = (
        inverse_frequencies(plain, case["head_dim"])[0]
        / inverse_frequencies(scaled, case["head_dim"])[0]
    )
    carried = RopeConfig(theta=scaled.theta, freq_divisors=tuple(divisors.tolist()))
    np.testing.assert_allclose(
        inverse_frequencies(carried, case["head_dim"])[0], case["inv_freq"], rtol=_ROUNDING
    )


def test_yarn_factor_defaults_to_the_ratio_of_contexts() -> None:
    rope = RopeConfig.from_hf(
        {
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 2048},
        }
    )
    assert rope.factor == 4.0


def test_yarn_with_a_ramp_of_no_width_is_a_step() -> None:
    rope = RopeConfig(
        theta=10000.0,
        kind="yarn",
        factor=4.0,
        original_max_context=64,
        beta_fast=1e6,
        beta_slow=1e5,
    )
    frequencies, _ = inverse_frequencies(rope, 16)
    assert np.all(np.isfinite(frequencies))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"theta": float("nan")}, "rope theta must be a finite number above 1"),
        ({"kind": "linear", "factor": 0.9}, "rope factor of 'linear' must be at least 1"),
        ({"kind": "yarn", "factor": 2.0}, "'yarn' needs original_max_position_embeddings above 0"),
        (
            {"kind": "llama3", "original_max_context": 8, "low_freq_factor": 4.0},
            "0 < low_freq_factor < high_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_bad_values_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeConfig(**({"theta": 10000.0} | arguments))


def _label(config: dict[str, Any]) -> str:
    rope = config["rope_parameters"]
    return f"{rope['rope_type']}-{config['head_dim']}-{rope.get('factor', 1)}"
