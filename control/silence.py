# SPDX-License-Identifier: Apache-2.0
"""Notices, when it is due and not at the next look, that someone has been silent for too long."""

import collections
from collections.abc import Callable
from typing import Generic, TypeVar

from kvferry.control.control_loop import ControlLoop, Timer

# Looks are at least this far apart, also if rounding puts one just before the time.
_LEAST_WAIT_SECONDS = 0.005

K = TypeVar("K")


class SilenceWatch(Generic[K]):
    """Silence of any number of peers, measured in the time that this process was awake.

    It sleeps until the one that was silent for longest is due, and for good if there is none. A
    sign of life costs nothing but a note. Everything runs on the control loop's thread.

    Args:
        loop: The control loop.
        limit_seconds: Silence that is too long. Positive.
        on_silent: Called with (peer) once its silence has lasted that long; it is forgotten then.
    """

    def __init__(
        self, loop: ControlLoop, limit_seconds: float, on_silent: Callable[[K], None]
    ) -> None:
        self._loop = loop
        self._limit_seconds = limit_seconds
        self._on_silent = on_silent
        self._heard: collections.OrderedDict[K, float] = collections.OrderedDict()  # Oldest first.
        self._timer: Timer | None = None

    def __len__(self) -> int:
        """Returns how many are watched."""
        return len(self._heard)

    def __contains__(self, peer: K) -> bool:
        """Returns whether the peer is watched."""
        return peer in self._heard

    def heard(self, peer: K) -> None:
        """Notes a sign of life, and watches the peer from now on."""
        self._heard[peer] = self._loop.awake_seconds
        self._heard.move_to_end(peer)
        self._arm()

    def forget(self, peer: K) -> None:
        """Watches the peer no longer. Unknown ones are ignored."""
        self._heard.pop(peer, None)

    def close(self) -> None:
        """Forgets all. Idempotent."""
        self._heard.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._heard:
            oldest = next(iter(self._heard.values()))
            wait_seconds = oldest + self._limit_seconds - self._loop.awake_seconds
            self._timer = self._loop.call_later(max(wait_seconds, _LEAST_WAIT_SECONDS), self._look)

    def _look(self) -> None:
        self._timer = None
        limit = self._loop.awake_seconds - self._limit_seconds
        while self._heard:
            peer, heard = next(iter(self._heard.items()))
            if heard > limit:
                break
            del self._heard[peer]
            self._on_silent(peer)
        self._arm()
