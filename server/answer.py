# SPDX-License-Identifier: Apache-2.0
"""Sends the answer of a call: one JSON document, or a stream of server-sent events.

The head of a stream is held back until the first output: up to then a failure can still be told by
its status, which a router retries; afterwards only by an event. Every event is one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.server.call import Call, ClientGoneError, SequenceResult
from kvferry.server.errors import ApiError, ErrorStyle, error_body

DONE = b"data: [DONE]\n\n"

_DONE_TEXT = b"data: [DONE]"
_DONE_ESCAPED = b"data: \\u005bDONE]"
_JSON = (b"content-type", b"application/json")
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerForm(Protocol):
    """The shape of the answers of one route. One object serves one call."""

    @property
    def style(self) -> ErrorStyle:
        """How errors are worded."""

    def document(self, results: Sequence[SequenceResult]) -> bytes:
        """Returns the whole answer as JSON."""

    def opening(self) -> list[bytes]:
        """Returns the JSON events that precede all output."""

    def events(self, index: int, result: SequenceResult) -> list[bytes]:
        """Returns the JSON events for what a sequence has produced since the last call."""

    def closing(self, results: Sequence[SequenceResult]) -> list[bytes]:
        """Returns the JSON events that follow all output."""


def sse_event(payload: bytes) -> bytes:
    """Frames a JSON document as one server-sent event.

    The end mark of a stream may also stand in a generated text. A router that looks for it in the
    raw bytes would cut the stream there, so its bracket is escaped; JSON readers see no difference.

    Args:
      payload: UTF-8 JSON without line breaks.

    Returns:
      The event, blank line included.
    """
    if _DONE_TEXT in payload:
        payload = payload.replace(_DONE_TEXT, _DONE_ESCAPED)
    return b"data: " + payload + b"\n\n"


class ErrorAnswer(Response):
    """An error as JSON, sent without Content-Length.

    A router that wraps the error of a stream into an event of its own keeps the length of the
    original and so cuts it off; without a length it arrives whole.

    Args:
      style: how the error is worded.
      error: the error.
    """

    def __init__(self, style: ErrorStyle, error: ApiError):
        super().__init__(
            error_body(style, error.message, error.status),
            status_code=error.status,
            media_type="application/json",
        )
        del self.headers["content-length"]


class CallAnswer(Response):
    """The answer of a call. Ends the call when the client leaves.

    Args:
      call: the call.
      form: the shape of the answer.
      stream: whether to send events instead of one document.
    """

    def __init__(self, call: Call, form: AnswerForm, stream: bool):
        super().__init__()
        self._call = call
        self._form = form
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer as an ASGI application."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._stream:
                await self._send_stream(scope, receive, send)
            else:
                await self._send_document(send)
        except ClientGoneError:
            pass
        except ApiError as error:
            await ErrorAnswer(self._form.style, error)(scope, receive, send)
        finally:
            watcher.cancel()
            # Does nothing after the last output: a client that leaves then, leaves in time.
            self._call.fail(ClientGoneError("the connection was closed before the answer ended"))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.fail(ClientGoneError("the client closed its connection"))

    async def _send_document(self, send: Send) -> None:
        while not self._call.finished:
            await self._call.wait()
        body = self._form.document(self._call.results)
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [_JSON, length]})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        news = await self._call.wait()
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        try:
            for payload in self._form.opening():
                await _send_part(send, sse_event(payload))
            while True:
                for index in news:
                    for payload in self._form.events(index, self._call.results[index]):
                        await _send_part(send, sse_event(payload))
                if self._call.exhausted:
                    break
                news = await self._call.wait()
            for payload in self._form.closing(self._call.results):
                await _send_part(send, sse_event(payload))
        except ApiError as error:
            payload = error_body(self._form.style, error.message, error.status)
            await _send_part(send, sse_event(payload))
        await send({"type": "http.response.body", "body": DONE})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
