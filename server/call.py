# SPDX-License-Identifier: Apache-2.0
"""Brings outputs from the scheduler's step thread to the HTTP answer that waits for them.

1. The step thread calls `Mailbox.post`; it never blocks.
2. The first post since the event loop last looked wakes the loop, later ones only join the queue:
   a step with 64 sequences costs one wake-up, not 64.
3. On the loop, each output is added to its sequence's `SequenceResult` and the waiting answer is
   woken. An answer whose client reads slowly finds several outputs at its next look and sends
   them as one event, so a slow client holds no more memory than its own answer.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable, Sequence

from kvferry.engine.request import FinishReason, RequestOutput, TokenLogprob
from kvferry.server.errors import BAD_REQUEST, UNAVAILABLE, ApiError

# What OpenAI's routes put before the id of a request.
CHAT_PREFIX = "chatcmpl-"
COMPLETION_PREFIX = "cmpl-"


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


class SequenceResult:
    """What one sequence has produced so far. Touched by the event loop only.

    Attributes:
      public_id: the id that the client sees.
      text_parts: pieces of text; joined they are the answer.
      token_ids: tokens generated.
      logprobs: one entry per generated token, if asked for.
      prompt_logprobs: entries of the prompt, if asked for and known here.
      finish: why it ended; None while it runs.
      prompt_tokens: length of the prompt.
      completion_tokens: number of tokens generated.
      cached_tokens: prompt tokens that came out of a cache.
      latency_seconds: time from the start of the call to the latest output.
      first_output_seconds: the same for the first token; None before it.
    """

    def __init__(self, public_id: str, prompt_tokens: int):
        self.public_id = public_id
        self.text_parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self.finish: FinishReason | None = None
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.latency_seconds = 0.0
        self.first_output_seconds: float | None = None

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.text_parts)

    def add(self, output: RequestOutput, latency_seconds: float) -> None:
        """Adds an output.

        Args:
          output: the output, in the order in which the scheduler made it.
          latency_seconds: time since the start of the call.
        """
        if output.text:
            self.text_parts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish = output.finish
        self.completion_tokens = output.completion_tokens
        self.cached_tokens = output.cached_tokens
        self.latency_seconds = latency_seconds


class Call:
    """All sequences of one HTTP request. Touched by the event loop only.

    Args:
      public_ids: the id that the client sees, one per sequence.
      prompt_tokens: lengths of the prompts.
      abort: called with the index of a sequence, a reason and a status to end it early.
      observe: called with each output and its latency, for the metrics.
    """

    def __init__(
        self,
        public_ids: Sequence[str],
        prompt_tokens: Sequence[int],
        abort: Callable[[int, str, int], None],
        observe: Callable[[RequestOutput, SequenceResult], None],
    ):
        self.results = [
            SequenceResult(name, length)
            for name, length in zip(public_ids, prompt_tokens, strict=True)
        ]
        self._abort = abort
        self._observe = observe
        self._started = time.monotonic()
        self._news: set[int] = set()
        self._wake = asyncio.Event()
        self._failure: ApiError | ClientGoneError | None = None

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(result.finish is not None for result in self.results)

    @property
    def over(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._failure is not None or self.finished

    @property
    def exhausted(self) -> bool:
        """Whether every sequence has ended and `wait` has told all of it."""
        return self.finished and not self._news

    def goes_by(self, rid: str) -> bool:
        """Tells whether a client means this call by an id.

        Args:
          rid: the request's id as the client gave it or as it was answered, or the id of one of
            its sequences.

        Returns:
          Whether it is this call's.
        """
        names = {f"{prefix}{rid}" for prefix in ("", CHAT_PREFIX, COMPLETION_PREFIX)}
        return any(
            result.public_id == name or result.public_id.startswith(f"{name}_")
            for result in self.results
            for name in names
        )

    async def wait(self) -> list[int]:
        """Waits for new outputs.

        Returns:
          Indices of the sequences that have something new, ascending.

        Raises:
          ApiError: a sequence was aborted or failed; the others were aborted with it.
          ClientGoneError: the client closed its connection.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._failure is not None:
            raise self._failure
        news = sorted(self._news)
        self._news.clear()
        return news

    def take(self, index: int, output: RequestOutput) -> None:
        """Adds an output of a sequence and wakes whoever waits.

        Args:
          index: the sequence.
          output: its output.
        """
        result = self.results[index]
        if result.finish is not None or self._failure is not None:
            return
        result.add(output, time.monotonic() - self._started)
        self._news.add(index)
        self._wake.set()
        self._observe(output, result)
        finish = output.finish
        if finish is not None and finish.kind == "abort":
            status = finish.status if finish.status >= 400 else UNAVAILABLE
            self._end(ApiError(finish.message or "the request was aborted", status))

    def fail(self, failure: ApiError | ClientGoneError) -> None:
        """Ends the call with an error, unless it has ended, and aborts what still runs.

        Args:
          failure: what `wait` raises from now on.
        """
        if not self.finished:
            self._end(failure)

    def _end(self, failure: ApiError | ClientGoneError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        self._wake.set()
        status = failure.status if isinstance(failure, ApiError) else BAD_REQUEST
        for index, result in enumerate(self.results):
            if result.finish is None:
                self._abort(index, str(failure), status)


class Mailbox:
    """Carries outputs from the step thread to the event loop, many per wake-up.

    Args:
      loop: the loop on which outputs are delivered.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        self._posts: collections.deque[tuple[Call, int, RequestOutput]] = collections.deque()
        self._scheduled = False

    def post(self, call: Call, index: int, output: RequestOutput) -> None:
        """Queues an output for delivery. Called on the step thread; never blocks.

        Args:
          call: where it belongs.
          index: the sequence within the call.
          output: the output.
        """
        with self._lock:
            self._posts.append((call, index, output))
            if self._scheduled or self._loop.is_closed():
                return
            self._scheduled = True
        self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            posts, self._posts = self._posts, collections.deque()
            self._scheduled = False
        for call, index, output in posts:
            call.take(index, output)
