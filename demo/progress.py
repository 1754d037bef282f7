# SPDX-License-Identifier: Apache-2.0
"""Shows that something is going on while servers start."""

import re
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "3/14 decode 8" in "Compiling: 3/14 decode 8"
_STEP = re.compile(r"compil\D*(\d+)\s*/\s*(\d+)\b[\s:,\]]*(.*)", re.IGNORECASE)
# Where the output is not a terminal a changed line is printed, at most this often.
_LINE_SECONDS = 2.0


def describe(log_tail: str) -> str:
    """Says in a few words what a starting server is doing.

    Args:
      log_tail: the last part of its log; a progress bar that redraws itself counts as lines.

    Returns:
      Its last step as "compiling 3/14 ..." if it reports such steps, else "starting".
    """
    for line in reversed(re.split(r"[\r\n]+", _ANSI.sub("", log_tail))):
        match = _STEP.search(line)
        if match:
            done, total, what = match.groups()
            return f"compiling {done}/{total} {what}".rstrip()
    return "starting"


class Progress:
    """One status line: redrawn in place on a terminal, a new line per change elsewhere.

    Args:
      stream: where to write; None: nowhere.
    """

    def __init__(self, stream: TextIO | None = sys.stdout) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._shown = ""
        self._shown_at = float("-inf")

    def say(self, text: str) -> None:
        """Prints a line that stays.

        Args:
          text: the line.
        """
        if self._stream is not None:
            self._clear()
            self._stream.write(text + "\n")
            self._stream.flush()

    def begin(self) -> None:
        """Starts counting the seconds that `update` shows."""
        self._started = time.monotonic()
        self._shown = ""

    def update(self, states: Mapping[str, str]) -> None:
        """Shows what each process is doing, with the seconds since `begin`.

        Args:
          states: name of a process to a few words.
        """
        if self._stream is None:
            return
        now = time.monotonic()
        text = "  ".join(f"{name}: {state}" for name, state in states.items())
        if self._stream.isatty():
            line = f"{now - self._started:5.0f} s  {text}"
            # A line that wraps could not be redrawn.
            self._stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
            self._shown = text
        elif text != self._shown and now - self._shown_at >= _LINE_SECONDS:
            self._stream.write(f"{now - self._started:5.0f} s  {text}\n")
            self._shown, self._shown_at = text, now
        self._stream.flush()

    def _clear(self) -> None:
        if self._shown and self._stream is not None and self._stream.isatty():
            self._stream.write("\r\x1b[K")
        self._shown = ""
