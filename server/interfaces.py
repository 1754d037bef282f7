# SPDX-License-Identifier: Apache-2.0
"""What the server is built from: the scheduler and tokenizer it needs, and its names and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from kvferry.engine.request import Request
from kvferry.engine.scheduler_stats import SchedulerStats

Role = Literal["null", "prefill", "decode"]


class EngineScheduler(Protocol):
    """What the server needs of a scheduler; `kvferry.engine.scheduler.Scheduler` has it."""

    @property
    def healthy(self) -> bool:
        """Whether the step thread runs and takes requests."""

    @property
    def failure(self) -> BaseException | None:
        """What ended the step thread, or None."""

    def validate(self, request: Request) -> None:
        """Raises ValueError for a request that can never be served."""

    def submit(self, request: Request) -> int:
        """Queues a request and returns its ticket; raises QueueFullError."""

    def abort_ticket(self, ticket: int, *, message: str, status: int) -> None:
        """Ends one request early; does nothing when it has ended."""

    def stats(self) -> SchedulerStats:
        """Counts of requests, tokens and pages."""


class TextTokenizer(Protocol):
    """What the server needs of a tokenizer; `kvferry.engine.tokenizer.Tokenizer` has it."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into token ids."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns token ids into text."""

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, possibly a part of a character."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        **kw: object,
    ) -> str:
        """Renders a conversation as a prompt; raises ValueError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Names and limits of a server.

    Attributes:
      model_name: the model's name, as clients see it.
      role: "null" serves whole requests; "prefill" and "decode" serve halves that a router pairs.
      max_context: longest prompt plus answer in tokens.
      max_body_bytes: longest request body.
      max_sequences: most sequences (prompts times samples) of one request.
      server_info: further fields of /server_info. `model_path` belongs here only when it is a
        local folder: the router looks anything else up on a hub.
      model_info: further fields of /model_info.
    """

    model_name: str
    role: Role = "null"
    max_context: int
    max_body_bytes: int = 4 << 20
    max_sequences: int = 256
    server_info: Mapping[str, object] = dataclasses.field(default_factory=dict)
    model_info: Mapping[str, object] = dataclasses.field(default_factory=dict)
