# SPDX-License-Identifier: Apache-2.0
"""The shape of /v1/completions answers."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.request import TokenLogprob
from kvferry.server.call import SequenceResult
from kvferry.server.errors import ErrorStyle
from kvferry.server.interfaces import TextTokenizer
from kvferry.server.openai_common import Envelope, finish_fields
from kvferry.server.plan import SequencePlan


class CompletionForm:
    """Answers of /v1/completions; events carry only what is new.

    Args:
      envelope: the fields that all documents share.
      plans: the sequences.
      tokenizer: gives the texts of tokens.
      usage: whether a stream ends with its usage.
      echoes: what each text starts with: its prompt, or nothing.
    """

    style: ErrorStyle = "openai"

    def __init__(
        self,
        envelope: Envelope,
        plans: Sequence[SequencePlan],
        tokenizer: TextTokenizer,
        usage: bool,
        echoes: Sequence[str],
    ):
        self._envelope = envelope
        self._usage = usage
        self._choices = [
            _GrowingChoice(index, plan, tokenizer, echoes[index])
            for index, plan in enumerate(plans)
        ]

    def document(self, results: Sequence[SequenceResult]) -> bytes:
        """Returns the whole answer."""
        choices = [c.news(result) for c, result in zip(self._choices, results, strict=True)]
        return self._envelope.document(choices, results)

    def opening(self) -> list[bytes]:
        """Returns nothing: the first event comes with the first text."""
        return []

    def events(self, index: int, result: SequenceResult) -> list[bytes]:
        """Returns the new text of a sequence, if there is any, or its end."""
        choice = self._choices[index]
        if not choice.has_news(result):
            return []
        return [self._envelope.event(choice.news(result))]

    def closing(self, results: Sequence[SequenceResult]) -> list[bytes]:
        """Returns the usage, if asked for."""
        return [self._envelope.usage_event(results)] if self._usage else []


class _GrowingChoice:
    """One choice; gives what is new at each look."""

    def __init__(self, index: int, plan: SequencePlan, tokenizer: TextTokenizer, echo: str):
        self._index = index
        self._plan = plan
        self._tokenizer = tokenizer
        self._echo = echo
        self._prompt_done = False
        self._seen_parts = 0
        self._seen_logprobs = 0
        self._offset = 0

    def has_news(self, result: SequenceResult) -> bool:
        return result.finish is not None or len(result.text_parts) > self._seen_parts

    def news(self, result: SequenceResult) -> dict[str, object]:
        text = "".join(result.text_parts[self._seen_parts :])
        entries = result.logprobs[self._seen_logprobs :]
        if not self._prompt_done:
            self._prompt_done = True
            text = self._echo + text
            entries = [*result.prompt_logprobs, *entries]
        self._seen_parts = len(result.text_parts)
        self._seen_logprobs = len(result.logprobs)
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(entries) if self._plan.return_logprob else None,
            **finish_fields(result.finish),
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, object]:
        tokens = [self._tokenizer.token_text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        tops = [self._top(entry) for entry in entries] if self._plan.top_logprobs_num else None
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        # Best first; two tokens of one text (halves of characters) keep the better value.
        found: dict[str, float] = {}
        for logprob, token in (*entry.top, (entry.logprob, entry.token_id)):
            found.setdefault(self._tokenizer.token_text(token), logprob)
        return found
