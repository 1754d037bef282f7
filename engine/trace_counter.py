# SPDX-License-Identifier: Apache-2.0
"""Counts traces, so that a test can tell that serving compiles nothing new."""

from __future__ import annotations

import threading


class TraceCounter:
    """Counts how often a function was traced; tracing may happen on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self) -> None:
        """Counts one trace."""
        with self._lock:
            self._count += 1

    @property
    def count(self) -> int:
        """Traces so far."""
        return self._count
