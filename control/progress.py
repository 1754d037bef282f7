# SPDX-License-Identifier: Apache-2.0
"""Shows how far the start of a server is."""

import sys
import time
from typing import TextIO

_BAR_WIDTH = 24


class CompileProgress:
    """A bar on a terminal, a line per part elsewhere: "compiling 3/14 decode 8"."""

    def __init__(self, stream: TextIO = sys.stderr):
        """Remembers where to write, and starts the clock.

        Args:
          stream: where to write.
        """
        self._stream = stream
        self._started = time.monotonic()

    def __call__(self, done: int, total: int, label: str) -> None:
        """Shows one more part as done.

        Args:
          done: parts done.
          total: parts in all.
          label: what was done last.
        """
        seconds = time.monotonic() - self._started
        text = f"compiling {done}/{total} {label}"
        if not self._stream.isatty():
            self._stream.write(f"{text} ({seconds:.1f} s)\n")
        else:
            filled = _BAR_WIDTH * done // max(total, 1)
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            end = "\n" if done == total else ""
            self._stream.write(f"\r\x1b[K[{bar}] {text} ({seconds:.1f} s){end}")
        self._stream.flush()
