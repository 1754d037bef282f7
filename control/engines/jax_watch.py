# SPDX-License-Identifier: Apache-2.0
"""Tells whether `jax.experimental.transfer` can still receive anything in this process.

The library has a fixed number of receive buffers. A pull of other sizes than were published keeps
one for good, and so may a pull whose peer stops in the middle of a piece. When all are gone, no
pull in the process ever ends again, whatever it is from, and only a restart helps. The library
does not tell how many are left; but when none is, a pull from the process to itself does not end
either. So that is tried after each pull that failed, and again and again while pulls that were
given up have not ended.

How many pulls were given up says nothing: those from a peer that cannot be reached hold no buffer.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

_TICKS_BETWEEN_PROBES = 25
_TICKS_UNTIL_FAILURE = 50


def is_ready(array: Any) -> bool:
    """Returns whether an array has arrived or failed."""
    # Any: the method is there, but jax.Array does not declare it.
    return bool(array.is_ready())


class ReceiveWatch:
    """Watches the receiving half of a transfer server. `tick` runs on one thread, the rest on any.

    Args:
        probe: Starts a pull of one small array from this process to itself.
        on_active: Called without locks when `tick` has something to do.
    """

    def __init__(self, probe: Callable[[], jax.Array], on_active: Callable[[], None]) -> None:
        self._start_probe = probe
        self._on_active = on_active
        self._lock = threading.Lock()
        self._draining: list[tuple[list[jax.Array], object]] = []
        self._suspected = False
        self._probe: jax.Array | None = None
        self._ticks_to_next = 0
        self._ticks_without_arrival = 0

    @property
    def failure(self) -> str | None:
        """Why no pull can end well any more, or None."""
        with self._lock:
            if self._ticks_without_arrival < _TICKS_UNTIL_FAILURE:
                return None
            return (
                "nothing arrives any more, not even from this process itself: its receive buffers"
                f" are lost ({len(self._draining)} pulls that were given up have not ended);"
                " restart this process"
            )

    @property
    def num_draining(self) -> int:
        """Pulls that were given up and have not ended."""
        with self._lock:
            self._sweep()
            return len(self._draining)

    @property
    def active(self) -> bool:
        """Whether `tick` has something to do."""
        with self._lock:
            return bool(self._suspected or self._draining or self._probe is not None)

    def drain(self, arrays: list[jax.Array], connection: object) -> None:
        """Keeps what a pull that was given up consists of, until the library is done with it.

        Args:
            arrays: What was asked for.
            connection: Where. Closed in the middle of a transfer, it could wedge the publisher.
        """
        with self._lock:
            self._draining.append((arrays, connection))
        self._on_active()

    def suspect(self) -> None:
        """Says that a pull has failed."""
        with self._lock:
            self._suspected = True
        self._on_active()

    def arrived(self) -> None:
        """Says that something was received."""
        with self._lock:
            self._ticks_without_arrival = 0

    def tick(self) -> None:
        """Looks at the probe, or starts one if there is reason to. To be called at a steady pace.

        Time is counted in ticks: a process that was stopped must not find itself wedged.
        """
        with self._lock:
            self._sweep()
            self._ticks_to_next -= 1
            probe = self._probe
            if probe is None:
                due = self._draining and self._ticks_to_next <= 0
                if not (self._suspected or due):
                    return
                self._suspected = False
                self._ticks_to_next = _TICKS_BETWEEN_PROBES
        try:
            probe = self._start_probe() if probe is None else probe
            ended = is_ready(probe)
            if ended:
                # An array that carries an error is ready, too.
                probe.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            logging.warning("a pull from this process to itself failed: %s", error)
            with self._lock:
                self._probe = None
                self._suspected = True
                self._ticks_without_arrival += 1
            return
        with self._lock:
            self._probe = None if ended else probe
            self._ticks_without_arrival = 0 if ended else self._ticks_without_arrival + 1

    def _sweep(self) -> None:
        self._draining = [each for each in self._draining if not all(map(is_ready, each[0]))]
