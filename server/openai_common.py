# SPDX-License-Identifier: Apache-2.0
"""What the answers of the two OpenAI routes have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from kvferry.engine.request import FinishReason
from kvferry.engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from kvferry.server.call import SequenceResult
from kvferry.server.errors import ApiError
from kvferry.server.fields import at_least
from kvferry.server.sampling import sampling_params
from kvferry.server.schemas import Number, OpenAIBody


class Envelope:
    """The fields that every document and event of one answer shares.

    Args:
      answer_id: id of the answer.
      kind: value of `object`.
      model: name of the model.
      samples: sequences per prompt, for the usage.
    """

    def __init__(self, answer_id: str, kind: str, model: str, samples: int):
        self._fields = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._samples = samples

    def document(
        self, choices: Sequence[Mapping[str, object]], results: Sequence[SequenceResult]
    ) -> bytes:
        """Returns a whole answer.

        Args:
          choices: one object per sequence.
          results: the sequences, all ended.

        Returns:
          JSON with the usage.
        """
        return self._encode(choices, usage(results, self._samples))

    def event(self, choice: Mapping[str, object]) -> bytes:
        """Returns one event of a stream.

        Args:
          choice: the choice that has news.

        Returns:
          JSON.
        """
        return self._encode([choice], None)

    def usage_event(self, results: Sequence[SequenceResult]) -> bytes:
        """Returns the event that closes a stream with its usage.

        Args:
          results: the sequences, all ended.

        Returns:
          JSON.
        """
        return self._encode([], usage(results, self._samples))

    def _encode(
        self, choices: Sequence[Mapping[str, object]], usage_fields: Mapping[str, object] | None
    ) -> bytes:
        return msgspec.json.encode({**self._fields, "choices": choices, "usage": usage_fields})


def usage(results: Sequence[SequenceResult], samples: int) -> dict[str, object]:
    """Counts tokens as the OpenAI API does: a prompt once, whatever the number of its answers.

    Args:
      results: the sequences, the samples of a prompt side by side.
      samples: sequences per prompt.

    Returns:
      The `usage` object.
    """
    prompts = results[::samples]
    prompt_tokens = sum(result.prompt_tokens for result in prompts)
    completion_tokens = sum(result.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in prompts)},
    }


def finish_fields(finish: FinishReason | None) -> dict[str, object]:
    """Returns why a choice ended.

    Args:
      finish: the engine's reason, or None while it runs. Aborts never come here.

    Returns:
      `finish_reason` and `matched_stop`.
    """
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.kind, "matched_stop": finish.matched}


def openai_sampling(body: OpenAIBody, max_new_tokens: int | None) -> SamplingParams:
    """Builds the sampling parameters of an OpenAI request.

    Args:
      body: the request.
      max_new_tokens: most tokens to generate; None means up to the context limit.

    Returns:
      The parameters.

    Raises:
      ApiError: 400 naming the field that is out of range.
    """
    return sampling_params(
        body, max_new_tokens=max_new_tokens, min_new_tokens=body.min_tokens, seed=body.seed
    )


def top_count(name: str, value: Number | None) -> int:
    """Reads how many alternatives are wanted per token.

    Args:
      name: name of the field, for the message.
      value: the number, or None for 0.

    Returns:
      The number.

    Raises:
      ApiError: 400 if it is negative or more than the engine gives.
    """
    count = at_least(name, value, 0) or 0
    if count > MAX_TOP_LOGPROBS:
        raise ApiError(f"{name} must be at most {MAX_TOP_LOGPROBS}, is {count}")
    return count


def wants_usage(body: OpenAIBody) -> bool:
    """Tells whether a stream ends with its usage.

    Args:
      body: the request.

    Returns:
      `stream_options.include_usage`.
    """
    return body.stream_options is not None and bool(body.stream_options.include_usage)
