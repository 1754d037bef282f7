# SPDX-License-Identifier: Apache-2.0
"""The demo's closing table: what one answer cost, from what the client saw and the servers say."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.demo.client import Answer
from kvferry.demo.stack import get_json

Row = tuple[str, str]

_SETTLE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_PAGES = "kv_pages_used"
_BYTES = "kv_bytes_moved"
_HANDOVER = "last_handover_seconds"
_COUNT = "transfers_ok"
_STAGES = "last_handover_stages"


def server_state(url: str) -> Mapping[str, Any]:
    """Reads a server's counters.

    Args:
      url: the server's address.

    Returns:
      The first entry of `internal_states` in its /server_info; empty if there is none.

    Raises:
      ConnectionError: it does not answer.
    """
    states = get_json(f"{url}/server_info").get("internal_states") or [{}]
    return dict(states[0])


def settled_state(url: str, before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reads a server's counters once its pages are back.

    The client has its answer a moment before the servers have put everything away.

    Args:
      url: the server's address.
      before: its counters before the request.

    Returns:
      Its counters when it uses no more pages than before, or after three seconds.

    Raises:
      ConnectionError: it does not answer.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        after = server_state(url)
        if after.get(_PAGES) == before.get(_PAGES) or time.monotonic() > deadline:
            return after
        time.sleep(_POLL_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """A server's counters before and after one request."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def grown(self, key: str) -> int | None:
        """By how much a counter grew.

        Args:
          key: its name.

        Returns:
          The difference, or None if the server does not report it.
        """
        first, last = self.before.get(key), self.after.get(key)
        return None if first is None or last is None else int(last) - int(first)

    def pages(self) -> str:
        """Pages in use, in words."""
        first, last = self.before.get(_PAGES), self.after.get(_PAGES)
        if first is None or last is None:
            return _missing(_PAGES)
        return f"{first} before, {last} after"


def same_tokens(answer: Answer, other: Answer) -> bool:
    """Compares two answers.

    Args:
      answer: one.
      other: the other.

    Returns:
      Whether they have the same tokens, or, where a server named none, the same text and count.
    """
    if answer.tokens is not None and other.tokens is not None:
        return answer.tokens == other.tokens
    return (answer.text, answer.completion_tokens) == (other.text, other.completion_tokens)


def table(answer: Answer, colocated: Answer, prefill: Side, decode: Side) -> list[Row]:
    """Makes the table's rows.

    Args:
      answer: what the pair answered.
      colocated: what one server that does both answered.
      prefill: the prefill server's counters.
      decode: the decode server's counters.

    Returns:
      Label and value of each row.
    """
    return [
        ("time to first token (TTFT)", f"{answer.ttft_seconds * 1e3:.0f} ms"),
        ("  the same on one server", f"{colocated.ttft_seconds * 1e3:.0f} ms"),
        ("time per output token (TPOT)", _tpot(answer)),
        ("  the same on one server", _tpot(colocated)),
        (
            "tokens",
            f"{_or_missing(answer.prompt_tokens)} in, {_or_missing(answer.completion_tokens)} out",
        ),
        ("KV bytes moved", _moved(decode)),
        ("hand-over", _handover(decode)),
        ("  seconds after arrival", _stages(decode)),
        ("pages in use, prefill", prefill.pages()),
        ("pages in use, decode", decode.pages()),
        ("tokens equal one server's", _equality(answer, colocated)),
    ]


def render(rows: Sequence[Row]) -> str:
    """Lays the table out.

    Args:
      rows: label and value of each row.

    Returns:
      Its lines.
    """
    width = max(len(label) for label, _ in rows)
    rule = "-" * (width + 32)
    return "\n".join([rule, *(f"{label:<{width}}  {value}" for label, value in rows), rule])


def _missing(key: str) -> str:
    return f"unknown (/server_info reports no {key})"


def _or_missing(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _tpot(answer: Answer) -> str:
    if answer.tpot_seconds is None:
        return "none (fewer than two tokens)"
    return f"{answer.tpot_seconds * 1e3:.1f} ms"


def _moved(decode: Side) -> str:
    moved = decode.grown(_BYTES)
    if moved is None:
        return _missing(_BYTES)
    return f"{moved:,} ({moved / 2**20:.2f} MiB)"


def _handover(decode: Side) -> str:
    if decode.grown(_COUNT) == 0:
        return "none (the decode server received no KV cache)"
    seconds, moved = decode.after.get(_HANDOVER), decode.grown(_BYTES)
    if seconds is None:
        return _missing(_HANDOVER)
    if not moved or not seconds:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.1f} ms, {moved / seconds / 2**20:.0f} MiB/s"


def _stages(decode: Side) -> str:
    stages = decode.after.get(_STAGES)
    if stages is None:
        return _missing(_STAGES)
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in stages.items())


def _equality(answer: Answer, colocated: Answer) -> str:
    if not same_tokens(answer, colocated):
        return "NO"
    if answer.tokens is None or colocated.tokens is None:
        return "yes (text and count; a server did not name its tokens)"
    return f"yes ({len(answer.tokens)} of {len(colocated.tokens)})"
