# SPDX-License-Identifier: Apache-2.0
"""What one request adds to and multiplies into the logits: penalties, bias, minimum length.

Kept on the host as two dense rows per sequence that needs them, changed in place by each token and
handed to the sampler's full variant. Against counts kept on the device this costs a copy of two
[vocabulary] rows per such sequence and step, and buys that the state is a function of the token
ids alone: prefill server, decode server and a recomputed sequence all build the same rows.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.engine.sampling_params import SamplingParams


class LogitAdjustment:
    """Rows for `where(logit > 0, logit / scale, logit * scale) + bias`.

    The repetition penalty follows Hugging Face: it looks at prompt and output. Presence and
    frequency penalties follow OpenAI: they look at the output only.

    Attributes:
        scale: repetition penalty of each token seen, 1 elsewhere; [vocab_size] float32.
        bias: logit bias less presence and frequency penalties, minus infinity for end tokens that
            may not be chosen yet; [vocab_size] float32.
    """

    scale: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Iterable[int],
        stop_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        """Builds the rows for a sequence as it stands.

        Args:
            params: where penalties, bias and minimum length come from.
            prompt_ids: the prompt.
            output_ids: the tokens generated so far.
            stop_ids: tokens that may not be chosen before `params.min_new_tokens`.
            vocab_size: length of the rows.
        """
        self._params = params
        self._stop_ids = frozenset(token for token in stop_ids if token < vocab_size)
        self._counts: Counter[int] = Counter(output_ids)
        self._num_output = self._counts.total()
        self.scale = np.ones(vocab_size, np.float32)
        self.bias = np.zeros(vocab_size, np.float32)
        if params.repetition_penalty != 1.0:
            self.scale[np.asarray(prompt_ids, np.int64)] = params.repetition_penalty
        for token in {*self._counts, *params.logit_bias, *self._stop_ids}:
            self._refresh(token)

    @property
    def active(self) -> bool:
        """Whether the rows still change any logit, or may again."""
        params = self._params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or bool(params.logit_bias)
            or self._num_output < params.min_new_tokens
        )

    def append(self, token: int) -> None:
        """Takes one generated token into account.

        Args:
            token: the token, inside the vocabulary.
        """
        self._counts[token] += 1
        self._num_output += 1
        self._refresh(token)
        if self._num_output == self._params.min_new_tokens:
            for stop in self._stop_ids:
                self._refresh(stop)

    def _refresh(self, token: int) -> None:
        params, count = self._params, self._counts.get(token, 0)
        if count:
            self.scale[token] = params.repetition_penalty
        bias = params.logit_bias.get(token, 0.0) - params.frequency_penalty * count
        if count:
            bias -= params.presence_penalty
        if token in self._stop_ids and self._num_output < params.min_new_tokens:
            bias = -math.inf
        self.bias[token] = bias
