# SPDX-License-Identifier: Apache-2.0
"""The shape of /v1/chat/completions answers."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.request import TokenLogprob
from kvferry.server.call import SequenceResult
from kvferry.server.errors import ErrorStyle
from kvferry.server.interfaces import TextTokenizer
from kvferry.server.openai_common import Envelope, finish_fields
from kvferry.server.plan import SequencePlan


class ChatForm:
    """Answers of /v1/chat/completions; events carry only what is new.

    Args:
      envelope: the fields that all documents share.
      plans: the sequences, one per choice.
      tokenizer: gives the texts of tokens.
      usage: whether a stream ends with its usage.
    """

    style: ErrorStyle = "openai"

    def __init__(
        self,
        envelope: Envelope,
        plans: Sequence[SequencePlan],
        tokenizer: TextTokenizer,
        usage: bool,
    ):
        self._envelope = envelope
        self._plans = plans
        self._tokenizer = tokenizer
        self._usage = usage
        self._seen = [(0, 0)] * len(plans)

    def document(self, results: Sequence[SequenceResult]) -> bytes:
        """Returns the whole answer."""
        return self._envelope.document(
            [self._choice(index, result) for index, result in enumerate(results)], results
        )

    def opening(self) -> list[bytes]:
        """Returns one event per choice that names the speaker."""
        delta = {"role": "assistant", "content": ""}
        return [self._event(index, delta, [], {}) for index in range(len(self._plans))]

    def events(self, index: int, result: SequenceResult) -> list[bytes]:
        """Returns the new text of a sequence, if there is any, and its end."""
        parts, logprobs = self._seen[index]
        text = "".join(result.text_parts[parts:])
        # Log-probabilities wait for the text that they belong to.
        entries = result.logprobs[logprobs:] if text or result.finish is not None else []
        events = []
        if text or entries:
            self._seen[index] = (len(result.text_parts), logprobs + len(entries))
            events.append(self._event(index, {"content": text}, entries, {}))
        if result.finish is not None:
            events.append(self._event(index, {}, [], finish_fields(result.finish)))
        return events

    def closing(self, results: Sequence[SequenceResult]) -> list[bytes]:
        """Returns the usage, if asked for."""
        return [self._envelope.usage_event(results)] if self._usage else []

    def _choice(self, index: int, result: SequenceResult) -> dict[str, object]:
        message = {
            "role": "assistant",
            "content": result.text,
            "reasoning_content": None,
            "tool_calls": None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(index, result.logprobs),
            **finish_fields(result.finish),
        }

    def _event(
        self,
        index: int,
        delta: dict[str, str],
        entries: Sequence[TokenLogprob],
        finish: dict[str, object],
    ) -> bytes:
        choice: dict[str, object] = {"index": index, "delta": delta, "finish_reason": None}
        choice["logprobs"] = self._logprobs(index, entries) if entries else None
        return self._envelope.event({**choice, **finish})

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not self._plans[index].return_logprob:
            return None
        return {"content": [self._entry(entry) for entry in entries]}

    def _entry(self, entry: TokenLogprob) -> dict[str, object]:
        tops = [self._token(token, logprob) for logprob, token in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": tops}

    def _token(self, token: int, logprob: float | None) -> dict[str, object]:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token)),
        }
