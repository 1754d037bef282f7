# SPDX-License-Identifier: Apache-2.0
"""Turns the sampling fields of a request into the engine's `SamplingParams`."""

from __future__ import annotations

from typing import Any

from kvferry.engine.sampling_params import SamplingParams
from kvferry.server.errors import ApiError
from kvferry.server.fields import whole, whole_list
from kvferry.server.schemas import Number, SamplingFields

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_FLAGS = ("ignore_eos", "skip_special_tokens", "no_stop_trim")


def sampling_params(
    fields: SamplingFields,
    *,
    max_new_tokens: int | None,
    min_new_tokens: Number | None,
    seed: Number | None,
) -> SamplingParams:
    """Builds the sampling parameters of one prompt.

    Args:
      fields: the fields that all routes share; what is None keeps the engine's default.
      max_new_tokens: most tokens to generate; None means up to the context limit.
      min_new_tokens: fewest tokens to generate, or None.
      seed: seed of the first sample, or None.

    Returns:
      The parameters.

    Raises:
      ApiError: 400 naming the field that is out of range.
    """
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": whole("seed", seed)}
    for name in (*_FLOATS, *_FLAGS):
        value = getattr(fields, name)
        if value is not None:
            given[name] = value
    top_k = whole("top_k", fields.top_k)
    if top_k is not None:
        given["top_k"] = top_k
    least = whole("min_tokens", min_new_tokens)
    if least is not None:
        given["min_new_tokens"] = least
    if fields.stop is not None:
        given["stop"] = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if fields.stop_token_ids is not None:
        given["stop_token_ids"] = whole_list("stop_token_ids", fields.stop_token_ids)
    if fields.logit_bias is not None:
        given["logit_bias"] = fields.logit_bias
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise ApiError(str(error)) from error
