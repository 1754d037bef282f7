# SPDX-License-Identifier: Apache-2.0
"""A streaming chat client on the standard library, which measures what its user sees."""

import dataclasses
import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, str]

_TIMEOUT_SECONDS = 300.0
_DONE = "[DONE]"


class ChatError(RuntimeError):
    """The server refused, or its stream ended early."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One streamed answer.

    Attributes:
      text: all of it.
      tokens: its tokens as the server named them; None if it named none.
      prompt_tokens: how many tokens the prompt had; None if the server did not say.
      completion_tokens: how many it generated; None if the server did not say.
      finish_reason: why it ended, such as "stop" or "length".
      ttft_seconds: from the sending of the request to the first text.
      total_seconds: from the sending of the request to the end.
      tpot_seconds: mean time per token after the first; None for fewer than two tokens.
    """

    text: str
    tokens: tuple[str, ...] | None
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    ttft_seconds: float
    total_seconds: float
    tpot_seconds: float | None


def chat(
    url: str,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    name_tokens: bool = False,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Asks a chat question and streams the answer.

    Args:
      url: the server's or router's address, without a trailing slash.
      messages: the conversation, each with "role" and "content".
      max_tokens: the longest answer.
      temperature: 0 takes the likeliest token each time.
      name_tokens: whether to ask for the tokens one by one.
      on_text: called with each piece of text as it arrives.

    Returns:
      The answer and its timing.

    Raises:
      ChatError: no connection, an error status, an error event, or a stream without its end.
    """
    body: dict[str, Any] = {
        "model": "default",
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if name_tokens:
        body["logprobs"] = True
    collector = _Collector(on_text)
    try:
        for event in _events(url, body):
            collector.take(event)
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"The connection to {url} broke: {error!r}") from error
    return collector.answer()


class _Collector:
    """Puts the events of one stream together."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._sent = time.monotonic()
        self._first: float | None = None
        self._last = self._sent
        self._texts: list[str] = []
        self._tokens: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._finish: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds one event."""
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            named = (choice.get("logprobs") or {}).get("content") or ()
            self._tokens.extend(token["token"] for token in named)
            text = (choice.get("delta") or {}).get("content") or ""
            if text or named:
                self._last = time.monotonic()
                self._first = self._first or self._last
            if text:
                self._texts.append(text)
                self._on_text(text)

    def answer(self) -> Answer:
        """Sums up."""
        count = self._usage.get("completion_tokens")
        first = self._last if self._first is None else self._first
        return Answer(
            text="".join(self._texts),
            tokens=tuple(self._tokens) or None,
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=count,
            finish_reason=self._finish,
            ttft_seconds=first - self._sent,
            total_seconds=self._last - self._sent,
            tpot_seconds=(self._last - first) / (count - 1) if count and count > 1 else None,
        )


def _events(url: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Posts the request and yields the events of the answer."""
    connection = http.client.HTTPConnection(
        urllib.parse.urlsplit(url).netloc, timeout=_TIMEOUT_SECONDS
    )
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            body=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ChatError(f"{url} answered {response.status}: {_text(response.read())}")
        for line in response:
            name, _, data = line.decode("utf-8", "replace").strip().partition(":")
            if name != "data":
                continue
            if data.strip() == _DONE:
                return
            yield _parse(url, data)
        raise ChatError(f"{url} ended its stream without {_DONE}.")
    finally:
        connection.close()


def _parse(url: str, data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ChatError(f"{url} sent an event that is not JSON: {data.strip()[:500]}") from error
    if not isinstance(event, dict) or "error" in event:
        raise ChatError(f"{url} reported: {data.strip()[:500]}")
    return event


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace").strip()[:500] or "(no body)"
