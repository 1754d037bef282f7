# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies with the scalings of Hugging Face transformers.

All arithmetic is float32 in the order that transformers uses: at position 8000 one unit in the
last place of a frequency already turns a head by 5e-4 radians, so "more exact" float64 values
would agree less well with the checkpoints' own reference.

Sources: linear scaling (kaiokendev, "Things I'm learning while training SuperHOT"), yarn
(arXiv:2309.00071), llama3 (the reference code published with Llama 3.1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvferry.engine.config_fields import number
from kvferry.engine.errors import ModelError, UnsupportedModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
_DEFAULT_ROPE_THETA = 10000.0
_Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its scaling, with the names of Hugging Face.

    Attributes:
        theta: Base of the frequencies.
        kind: `default` (unscaled), `linear`, `llama3` or `yarn`.
        factor: How many times the context was stretched; at least 1 unless `default`.
        original_max_context: Context length before the stretch, in tokens (`llama3`, `yarn`).
        low_freq_factor: `llama3`: wavelengths above original_max_context / this are stretched.
        high_freq_factor: `llama3`: wavelengths below original_max_context / this are kept.
        beta_fast: `yarn`: rotations above which a frequency is kept.
        beta_slow: `yarn`: rotations below which a frequency is stretched in full.
        attention_factor: `yarn`: multiplies cos and sin; None derives it from `factor`.
        mscale: `yarn`: numerator of the derived attention factor; 0 means unset.
        mscale_all_dim: `yarn`: denominator of the derived attention factor; 0 means unset.
        truncate: `yarn`: round the correction range to whole dimensions.
        freq_divisors: Per-frequency divisors, length head_dim / 2, applied after the scaling
            that `kind` asks for; empty means none. GGUF files carry the llama3 scaling in this
            form (`rope_freqs.weight`).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    freq_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks the values that the chosen kind uses.

        Raises:
            ModelError: A value is out of range for `kind`.
        """
        if not (math.isfinite(self.theta) and self.theta > 1.0):
            raise ModelError(f"rope theta must be a finite number above 1, got {self.theta!r}")
        if self.kind == "default":
            return
        if not (math.isfinite(self.factor) and self.factor >= 1.0):
            raise ModelError(
                f"rope factor of {self.kind!r} must be at least 1, got {self.factor!r}"
            )
        if self.kind in ("llama3", "yarn") and self.original_max_context <= 0:
            raise ModelError(
                f"rope scaling {self.kind!r} needs original_max_position_embeddings above 0, "
                f"got {self.original_max_context!r}"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ModelError(
                "rope scaling 'llama3' needs 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor!r} and {self.high_freq_factor!r}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads RoPE from a config.json, in its old and its new form.

        Args:
            config: The parsed config.json. Either `rope_theta` and `rope_scaling` (transformers
                4) or `rope_parameters` (transformers 5).

        Returns:
            The RoPE configuration.

        Raises:
            UnsupportedModelError: The scaling type is not implemented, or RoPE covers only a
                part of each head.
            ModelError: A value is missing or out of range.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ModelError(f"rope_scaling in config.json must be an object, got {scaling!r}")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"partial_rotary_factor {partial!r} is not supported; only full rotary heads are"
            )
        theta = scaling.get("rope_theta", config.get("rope_theta"))
        theta = number(theta if theta is not None else _DEFAULT_ROPE_THETA, "rope_theta")
        if kind == "default":
            return cls(theta=theta)
        if kind not in ("linear", "llama3", "yarn"):
            raise UnsupportedModelError(
                f"rope scaling type {kind!r} is not supported; supported: default, linear, "
                "llama3, yarn"
            )
        original = config.get("original_max_position_embeddings")
        if original is None:
            original = scaling.get("original_max_position_embeddings")
        if original is None:
            original = config.get("max_position_embeddings", 0)
        original = int(number(original, "original_max_position_embeddings"))
        factor = scaling.get("factor")
        if factor is None and kind == "yarn" and original > 0:
            factor = number(config.get("max_position_embeddings"), "max_position_embeddings")
            factor /= original
        optional: dict[str, Any] = {
            name: number(scaling[name], name)
            for name in (
                *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
                *("attention_factor", "mscale", "mscale_all_dim"),
            )
            if scaling.get(name) is not None
        }
        return cls(
            theta=theta,
            kind=kind,
            factor=number(factor, "rope scaling factor"),
            original_max_context=original,
            truncate=bool(scaling.get("truncate", True)),
            **optional,
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[_Floats, float]:
    """Returns the angular step per position of each pair of dimensions.

    The engine rotates halves: dimension i is paired with dimension i + head_dim / 2.

    Args:
        rope: The RoPE configuration.
        head_dim: Size of a head; even.

    Returns:
        The frequencies, shape [head_dim / 2], float32, in radians per position; and the factor
        that multiplies both cos and sin (1.0 except for yarn).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods: _Floats = np.asarray(np.float32(rope.theta) ** exponents, np.float32)
    inv_freq: _Floats = np.reciprocal(periods)
    attention_factor = 1.0
    if rope.kind == "linear":
        inv_freq = inv_freq / np.float32(rope.factor)
    elif rope.kind == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif rope.kind == "yarn":
        inv_freq = _yarn(rope, periods, head_dim)
        attention_factor = _yarn_attention_factor(rope)
    if rope.freq_divisors:
        divisors: _Floats = np.asarray(rope.freq_divisors, np.float32)
        inv_freq = np.divide(inv_freq, divisors)
    return np.asarray(inv_freq, np.float32), attention_factor


def _llama3(rope: RopeConfig, inv_freq: _Floats) -> _Floats:
    """Stretches long wavelengths, keeps short ones, blends linearly in between."""
    one, factor = np.float32(1.0), np.float32(rope.factor)
    wavelength = np.float32(2 * math.pi) / inv_freq
    longest_kept = rope.original_max_context / rope.high_freq_factor
    shortest_stretched = rope.original_max_context / rope.low_freq_factor
    rotations = np.float32(rope.original_max_context) / wavelength
    blend = (rotations - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (one - blend) * inv_freq / factor + blend * inv_freq
    return np.where(
        wavelength > shortest_stretched,
        inv_freq / factor,
        np.where(wavelength < longest_kept, inv_freq, blended),
    ).astype(np.float32)


def _yarn(rope: RopeConfig, periods: _Floats, head_dim: int) -> _Floats:
    """Blends kept and stretched frequencies along a ramp over the dimensions."""
    low = _yarn_dimension(rope, rope.beta_fast, head_dim)
    high = _yarn_dimension(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    kept = np.float32(1.0) / periods
    stretched = np.float32(1.0) / (np.float32(rope.factor) * periods)
    return np.asarray(stretched * (np.float32(1.0) - keep) + kept * keep, np.float32)


def _yarn_dimension(rope: RopeConfig, rotations: float, head_dim: int) -> float:
    """Returns the (fractional) dimension that turns `rotations` times in the old context."""
    turns = rope.original_max_context / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(
            rope.factor, rope.mscale_all_dim
        )
    return _yarn_mscale(rope.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
