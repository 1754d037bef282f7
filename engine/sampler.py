# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token of every sequence of a step from its logits.

Three compiled variants, by what the batch needs: `greedy`, `sample` (temperature and filters) and
`full` (also penalties, bias and the most likely alternatives). Within a variant each row has its
own settings, as data: nothing is traced again when requests come and go. `sampling_ops.py` says
how a token is chosen.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import numpy as np
import numpy.typing as npt

from kvferry.engine import sampling_ops
from kvferry.engine.logit_adjustment import LogitAdjustment
from kvferry.engine.sampling_ops import RowSettings, Samples
from kvferry.engine.sampling_params import SamplingParams

Variant = Literal["greedy", "sample", "full"]
VARIANTS: tuple[Variant, ...] = ("greedy", "sample", "full")


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know of one sequence.

    Attributes:
        params: the request's sampling parameters.
        seed: 64-bit seed of the sequence.
        position: index in the sequence, prompt included, of the token to choose.
        adjustment: penalties and bias; None when there are none.
        top_logprobs: whether the most likely alternatives are wanted.
    """

    params: SamplingParams
    seed: int
    position: int
    adjustment: LogitAdjustment | None = None
    top_logprobs: bool = False

    @property
    def variant(self) -> Variant:
        """The least variant that serves this row."""
        if self.top_logprobs or (self.adjustment is not None and self.adjustment.active):
            return "full"
        return "greedy" if self.params.greedy else "sample"


class Sampler:
    """The compiled variants, and how a batch is laid out for them."""

    def __init__(self, vocab_size: int) -> None:
        """Makes a sampler; nothing is compiled yet.

        Args:
            vocab_size: number of tokens that may be chosen; logits may be padded beyond it.
        """
        self._vocab_size = vocab_size
        self._traced: list[Variant] = []  # an append is atomic, warm-up traces in threads

        def greedy(logits: jax.Array) -> Samples:
            self._traced.append("greedy")
            return sampling_ops.sample_greedy(logits[:, :vocab_size])

        def sample(logits: jax.Array, settings: RowSettings) -> Samples:
            self._traced.append("sample")
            return sampling_ops.sample_filtered(logits[:, :vocab_size], settings)

        def full(
            logits: jax.Array, settings: RowSettings, scale: jax.Array, bias: jax.Array
        ) -> Samples:
            self._traced.append("full")
            return sampling_ops.sample_full(logits[:, :vocab_size], settings, scale, bias)

        self._greedy = jax.jit(greedy)
        self._sample = jax.jit(sample)
        self._full = jax.jit(full)

    @property
    def num_traces(self) -> int:
        """How often a variant was traced; must not grow while serving."""
        return len(self._traced)

    def warm_up(self, logits: jax.Array) -> None:
        """Compiles every variant for logits of this shape and sharding, and waits for it.

        Args:
            logits: what a step gives; [S, V] float32.
        """
        with ThreadPoolExecutor(len(VARIANTS), thread_name_prefix="compile-sampler") as threads:
            jax.block_until_ready(
                list(threads.map(lambda variant: self._run(variant, logits, ()), VARIANTS))
            )

    def sample(self, logits: jax.Array, rows: Sequence[SamplingRow | None]) -> Samples:
        """Chooses a token for each row; does not wait for the result.

        Args:
            logits: raw logits of the step; [S, V] float32.
            rows: settings of the first `len(rows)` rows; None for rows nobody reads.

        Returns:
            Arrays of S rows; those without settings hold anything.

        Raises:
            ValueError: there are more rows than logits.
        """
        if len(rows) > logits.shape[0]:
            raise ValueError(f"{len(rows)} rows to sample, but logits for {logits.shape[0]}")
        needed = [row.variant for row in rows if row is not None]
        return self._run(max(needed, key=VARIANTS.index, default="greedy"), logits, rows)

    def _run(
        self, variant: Variant, logits: jax.Array, rows: Sequence[SamplingRow | None]
    ) -> Samples:
        if variant == "greedy":
            return self._greedy(logits)
        settings = row_settings(rows, logits.shape[0])
        if variant == "sample":
            return self._sample(logits, settings)
        scale, bias = adjustment_rows(rows, logits.shape[0], self._vocab_size)
        return self._full(logits, settings, scale, bias)


def row_settings(rows: Sequence[SamplingRow | None], num_rows: int) -> RowSettings:
    """Lays the settings of a batch out as arrays.

    Args:
        rows: settings of the first rows.
        num_rows: S, the number of rows of the logits.

    Returns:
        Arrays of S rows.
    """
    floats = np.empty((num_rows, 3), np.float32)
    floats[:] = (1.0, 1.0, -np.inf)
    words = np.zeros((num_rows, 5), np.uint32)
    for index, row in enumerate(rows):
        if row is None or row.params.greedy:
            continue
        params = row.params
        log_min_p = np.log(params.min_p) if params.min_p > 0.0 else -np.inf
        floats[index] = (params.temperature, params.top_p, log_min_p)
        # Any k beyond the largest int32 is beyond every vocabulary.
        top_k = min(max(params.top_k, 0), 2**31 - 1)
        words[index] = (top_k, row.position, 1, row.seed >> 32, row.seed & 0xFFFFFFFF)
    return RowSettings(floats, words)


def adjustment_rows(
    rows: Sequence[SamplingRow | None], num_rows: int, vocab_size: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Lays the penalties and biases of a batch out as arrays.

    Args:
        rows: settings of the first rows.
        num_rows: S, the number of rows of the logits.
        vocab_size: V.

    Returns:
        Scale (1 where there is none) and bias (0 where there is none); each [S, V] float32.
    """
    scale = np.ones((num_rows, vocab_size), np.float32)
    bias = np.zeros((num_rows, vocab_size), np.float32)
    for index, row in enumerate(rows):
        if row is not None and row.adjustment is not None:
            scale[index] = row.adjustment.scale
            bias[index] = row.adjustment.bias
    return scale, bias
