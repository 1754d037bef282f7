# SPDX-License-Identifier: Apache-2.0
"""A scheduler that follows a script, and a tokenizer of bytes, for tests of the HTTP protocol.

The numbers can be worked out by hand. The answer of a prompt is a run of letters: the first token
says how long the prompt was (`first_token`), the others count on through the alphabet, so a test
sees at a glance whether tokens are lost, doubled or out of order. With a meeting (a bootstrap room)
the decode side takes its first token from what the prefill side left there.
"""

import dataclasses
import itertools
import queue
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized

from kvferry.engine.request import FinishReason, Request, RequestOutput, TokenLogprob
from kvferry.engine.scheduler import QueueFullError
from kvferry.engine.scheduler_stats import SchedulerStats
from kvferry.engine.step_loop import StepLoop

VOCAB_SIZE = 260
EOS_ID = 259
MAX_CONTEXT = 512
LETTERS = string.ascii_lowercase


class ByteTokenizer:
    """Token i is the byte i; above 255 there are tokens without text."""

    vocab_size = VOCAB_SIZE
    eos_ids = (EOS_ID,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        **kw: object,
    ) -> str:
        if messages[0]["role"] == "forbidden":
            raise ValueError("role 'forbidden' is not known")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step adds: a token, its text, or the end."""

    token: int | None = None
    text: str | None = None
    finish: FinishReason | None = None


Script = Callable[[Request], Iterator[Piece | None]]
"""One piece per step; None is a step without news."""


def first_token(prompt: Sequence[int]) -> int:
    """The letter at the prompt's length."""
    return ord(LETTERS[len(prompt) % 26])


def expected_text(prompt: Sized, count: int) -> str:
    """The text of the first `count` tokens of the default script."""
    start = len(prompt) % 26
    return "".join(LETTERS[(start + i) % 26] for i in range(count))


def count_on(request: Request) -> Iterator[Piece | None]:
    """The default script: letters up to the limit."""
    yield from letters(first_token(request.prompt_ids), request.params.max_new_tokens)


def letters(first: int, limit: int | None) -> Iterator[Piece | None]:
    """Letters from `first` on, ended by the limit (at most 200)."""
    count = 200 if limit is None else limit
    if count == 0:
        yield Piece(finish=FinishReason("length"))
    start = LETTERS.index(chr(first))
    for i in range(count):
        last = FinishReason("length") if i == count - 1 else None
        yield Piece(ord(LETTERS[(start + i) % 26]), finish=last)


class Meetings:
    """Where a scripted prefill leaves the first token of a room for a scripted decode."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._lock = threading.Lock()

    def prefill(self, request: Request) -> Iterator[Piece | None]:
        """Script of a prefill server."""
        assert request.bootstrap is not None
        with self._lock:
            self._tokens[request.bootstrap.room] = first_token(request.prompt_ids)
        yield from count_on(request)

    def decode(self, request: Request) -> Iterator[Piece | None]:
        """Script of a decode server: waits for the room, at most 5 s."""
        assert request.bootstrap is not None
        deadline = time.monotonic() + 5
        while True:
            with self._lock:
                token = self._tokens.pop(request.bootstrap.room, None)
            if token is not None:
                break
            if time.monotonic() > deadline:
                reason = FinishReason("abort", message="the prefill never came", status=503)
                yield Piece(finish=reason)
                return
            yield None
        yield from letters(token, request.params.max_new_tokens)

    def __len__(self) -> int:
        return len(self._tokens)


class _Live:
    def __init__(self, request: Request, pieces: Iterator[Piece | None]):
        self.request = request
        self.pieces = pieces
        self.count = 0


class ScriptedScheduler(StepLoop):
    """The interface of a scheduler, with a script in place of a model."""

    def __init__(self, script: Script = count_on, max_live: int = 64):
        super().__init__("scripted step")
        self._script = script
        self._max_live = max_live
        self._tickets = itertools.count()
        self._live: dict[int, _Live] = {}
        self._accepted: set[int] = set()
        self.submitted: list[Request] = []
        self.aborted: queue.Queue[tuple[str, str, int]] = queue.Queue()

    def validate(self, request: Request) -> None:
        size = len(request.prompt_ids)
        if size >= MAX_CONTEXT:
            raise ValueError(f"the prompt has {size} tokens, the context is {MAX_CONTEXT}")
        for token in request.prompt_ids:
            if not 0 <= token < VOCAB_SIZE:
                raise ValueError(f"prompt token id {token} is outside [0, {VOCAB_SIZE})")
        most = request.params.max_new_tokens
        if most is not None and size + most > MAX_CONTEXT:
            raise ValueError(f"max_new_tokens {most} leaves the context of {MAX_CONTEXT}")
        request.params.check_vocabulary(VOCAB_SIZE)

    def submit(self, request: Request) -> int:
        ticket = next(self._tickets)
        if len(self._accepted) >= self._max_live:
            raise QueueFullError(f"{self._max_live} requests are waiting already")
        self._accepted.add(ticket)
        self.submitted.append(request)
        self.call_soon(lambda: self._accept(ticket, request))
        return ticket

    def abort_ticket(self, ticket: int, *, message: str, status: int) -> None:
        self.call_soon(lambda: self._abort(ticket, message, status))

    def stats(self) -> SchedulerStats:
        live = list(self._live.values())
        return SchedulerStats(
            live=len(live),
            waiting=0,
            prefilling=0,
            running=len(live),
            held=0,
            num_tokens=sum(len(item.request.prompt_ids) + item.count for item in live),
            num_pages=100,
            used_pages=len(live),
            used_slots=len(live),
            max_slots=self._max_live,
            max_live=self._max_live,
            accepted_total=len(self.submitted),
            finished_total={"stop": 0, "length": 0, "abort": 0},
            prompt_tokens_total=0,
            generated_tokens_total=0,
            preemptions_total=0,
            prefill_steps_total=0,
            decode_steps_total=0,
            step_seconds_total=0.0,
        )

    def turn(self) -> float | None:
        self._empty_inbox()
        for ticket, item in list(self._live.items()):
            piece = next(item.pieces)
            if piece is not None:
                self._put_out(ticket, item, piece)
        return 0.001 if self._live else None

    def has_pending(self) -> bool:
        return bool(self._live)

    def wind_down(self, failure: Exception | None) -> None:
        for ticket in list(self._live):
            self._abort(ticket, "the scheduler ended", 503)

    def _accept(self, ticket: int, request: Request) -> None:
        self._live[ticket] = _Live(request, self._script(request))

    def _abort(self, ticket: int, message: str, status: int) -> None:
        item = self._live.get(ticket)
        if item is not None:
            self.aborted.put((item.request.request_id, message, status))
            reason = FinishReason("abort", message=message, status=status)
            self._put_out(ticket, item, Piece(finish=reason))

    def _put_out(self, ticket: int, item: _Live, piece: Piece) -> None:
        request = item.request
        first = item.count == 0
        tokens = () if piece.token is None else (piece.token,)
        item.count += len(tokens)
        text = piece.text
        if text is None:
            text = ByteTokenizer().decode(tokens)
        if piece.finish is not None:
            del self._live[ticket]
            self._accepted.discard(ticket)
        output = RequestOutput(
            request_id=request.request_id,
            token_ids=tokens,
            text=text,
            logprobs=_logprobs(request, tokens) if request.return_logprob else None,
            prompt_logprobs=_prompt_logprobs(request) if first else None,
            finish=piece.finish,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=item.count,
        )
        request.on_output(output)


def _logprobs(request: Request, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(_logprob(request, token) for token in tokens)


def _logprob(request: Request, token: int) -> TokenLogprob:
    top = tuple((-token / 100 - i, token + i) for i in range(request.num_top_logprobs))
    return TokenLogprob(-token / 100, token, top)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob, ...] | None:
    if not request.wants_prompt_logprobs:
        return None
    ids = request.prompt_ids[request.logprob_start_len :]
    return tuple(
        TokenLogprob(None, t) if i == 0 else _logprob(request, t) for i, t in enumerate(ids)
    )
