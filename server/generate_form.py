# SPDX-License-Identifier: Apache-2.0
"""The shape of /generate answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvferry.engine.request import FinishReason, TokenLogprob
from kvferry.server.call import SequenceResult
from kvferry.server.errors import ErrorStyle
from kvferry.server.json_pieces import JsonList, JsonText
from kvferry.server.plan import SequencePlan

TokenText = Callable[[int], str]

_Entry = tuple[float | None, int, str | None]


class GenerateForm:
    """Answers of /generate: the whole text and all tokens so far, in every event.

    Args:
      plans: the sequences.
      batch: whether the answer is a list, and events carry an index.
      token_text: gives the texts that go with log-probabilities; None if they are not wanted.
    """

    style: ErrorStyle = "sglang"

    def __init__(self, plans: Sequence[SequencePlan], batch: bool, token_text: TokenText | None):
        self._batch = batch
        self._objects = [_GrowingObject(plan, token_text) for plan in plans]

    def document(self, results: Sequence[SequenceResult]) -> bytes:
        """Returns one object, or a list of them in the order of the prompts."""
        objects = [o.update(result) for o, result in zip(self._objects, results, strict=True)]
        return msgspec.json.encode(objects if self._batch else objects[0])

    def opening(self) -> list[bytes]:
        """Returns nothing: the first event comes with the first token."""
        return []

    def events(self, index: int, result: SequenceResult) -> list[bytes]:
        """Returns the sequence's object as it is now."""
        event = self._objects[index].update(result)
        if self._batch:
            event["index"] = index
        return [msgspec.json.encode(event)]

    def closing(self, results: Sequence[SequenceResult]) -> list[bytes]:
        """Returns nothing: the last event of a sequence carries its finish reason."""
        return []


def finish_object(finish: FinishReason | None, completion_tokens: int) -> dict[str, object] | None:
    """Returns `finish_reason` in SGLang's shape.

    Args:
      finish: why the sequence ended, or None while it runs.
      completion_tokens: number of tokens generated.

    Returns:
      The object, or None.
    """
    if finish is None:
        return None
    if finish.kind == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "abort", "message": finish.message, "status_code": finish.status}


class _GrowingObject:
    """The JSON object of one sequence; encodes only what is new at each update."""

    def __init__(self, plan: SequencePlan, token_text: TokenText | None):
        self._token_text = token_text
        self._logprobs = plan.return_logprob
        self._tops = plan.return_logprob and plan.top_logprobs_num > 0
        self._text = JsonText()
        self._ids = JsonList()
        self._output = JsonList()
        self._output_top = JsonList()
        self._seen_parts = 0
        self._seen_tokens = 0
        self._seen_logprobs = 0

    def update(self, result: SequenceResult) -> dict[str, object]:
        for part in result.text_parts[self._seen_parts :]:
            self._text.append(part)
        for token in result.token_ids[self._seen_tokens :]:
            self._ids.append(token)
        self._seen_parts = len(result.text_parts)
        self._seen_tokens = len(result.token_ids)
        meta: dict[str, object] = {
            "id": result.public_id,
            "finish_reason": finish_object(result.finish, result.completion_tokens),
            "prompt_tokens": result.prompt_tokens,
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": result.completion_tokens,
            "cached_tokens": result.cached_tokens,
        }
        if self._logprobs:
            self._add_logprobs(meta, result)
        if result.finish is not None:
            meta["e2e_latency"] = result.latency_seconds
        return {"text": self._text.raw(), "output_ids": self._ids.raw(), "meta_info": meta}

    def _add_logprobs(self, meta: dict[str, object], result: SequenceResult) -> None:
        for item in result.logprobs[self._seen_logprobs :]:
            self._output.append(self._entry(item))
            if self._tops:
                self._output_top.append(self._top_entries(item))
        self._seen_logprobs = len(result.logprobs)
        # Always a list, empty on a decode server: the router appends it to the prefill server's.
        meta["input_token_logprobs"] = [self._entry(item) for item in result.prompt_logprobs]
        meta["output_token_logprobs"] = self._output.raw()
        if self._tops:
            meta["input_top_logprobs"] = [
                self._top_entries(item) if item.top else None for item in result.prompt_logprobs
            ]
            meta["output_top_logprobs"] = self._output_top.raw()

    def _entry(self, item: TokenLogprob) -> _Entry:
        return item.logprob, item.token_id, self._text_of(item.token_id)

    def _top_entries(self, item: TokenLogprob) -> list[_Entry]:
        return [(logprob, token, self._text_of(token)) for logprob, token in item.top]

    def _text_of(self, token: int) -> str | None:
        return None if self._token_text is None else self._token_text(token)
