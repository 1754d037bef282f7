# SPDX-License-Identifier: Apache-2.0
"""The static choices of one attention call."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from kvferry.engine.kv_pool_layout import KVPoolLayout

Implementation = Literal["xla", "tpu"]
Family = Literal["prefill", "decode"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """What an attention call is compiled for, besides shapes.

    Attributes:
        sm_scale: Factor on the scores.
        layout: Sizes and dtype of the pool.
        family: `decode` promises that row i is the only new token of sequence i.
        implementation: `tpu` for JAX's Pallas kernel, `xla` for the reference.
    """

    sm_scale: float
    layout: KVPoolLayout
    family: Family
    implementation: Implementation

    @property
    def kv_dtype(self) -> jnp.dtype:
        """The dtype that the pool's bits mean."""
        return jnp.dtype(self.layout.dtype)
