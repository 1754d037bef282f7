# SPDX-License-Identifier: Apache-2.0
"""Totals that several threads count up."""

import collections
import threading


class Tally:
    """Named totals that only grow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: collections.Counter[str] = collections.Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to the total `name`, which starts at 0."""
        with self._lock:
            self._totals[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Returns a copy of all totals."""
        with self._lock:
            return dict(self._totals)
