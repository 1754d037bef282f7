# SPDX-License-Identifier: Apache-2.0
"""What sender and receiver have in common, and the memory of rooms that are over."""

import collections
import threading
import time
from collections.abc import Callable

import msgspec

from kvferry.control.connection import TransferFailure, TransferTiming
from kvferry.control.kv_poll import KVPoll, StateMachine
from kvferry.control.messages import clip_reason
from kvferry.control.wire import MAX_REQUEST_BYTES

_MAX_TOMBSTONES = 10_000
_EXTRA_BYTES_LIMIT = MAX_REQUEST_BYTES // 2


class Leg:
    """State, failure and timing of one leg; base of sender and receiver. Guarded by `lock`.

    Args:
        room: The room.
        lock: The manager's lock.
    """

    def __init__(self, room: int, lock: threading.Lock) -> None:
        self.room = room
        self.lock = lock
        self.machine = StateMachine(time.monotonic)
        self.touched = False
        self.num_bytes = 0
        self.pull_seconds = 0.0
        self._failure: TransferFailure | None = None

    @property
    def failure(self) -> TransferFailure | None:
        """Why the leg has failed, or None."""
        return self._failure

    @property
    def timing(self) -> TransferTiming:
        """When what happened."""
        entered = self.machine.entered
        return TransferTiming(
            opened=entered[KVPoll.Bootstrapping],
            ready=entered.get(KVPoll.WaitingForInput),
            first_chunk=entered.get(KVPoll.Transferring),
            finished=entered.get(KVPoll.Success, entered.get(KVPoll.Failed)),
            pull_seconds=self.pull_seconds,
            num_bytes=self.num_bytes,
            progress=self.machine.progress_at,
        )

    def poll(self) -> KVPoll:
        """Returns the current state."""
        return self.machine.state

    def mark_progress(self) -> None:
        """Records progress; the peer is told with the next sweep."""
        self.touched = True
        self.machine.touch()

    def fail_locked(self, failure: TransferFailure) -> bool:
        """Moves to `Failed`; the caller holds the lock.

        Returns:
            Whether this call did it.
        """
        if self.machine.state.terminal:
            return False
        # Before the state, since others read the two without the lock.
        self._failure = failure
        return self.machine.advance(KVPoll.Failed)


class Tombstones:
    """Rooms that have failed before their other leg appeared. Bounded; not locked.

    Args:
        lifetime_seconds: How long a late leg is still expected.
        clock: Returns the time in seconds.
    """

    def __init__(self, lifetime_seconds: float, clock: Callable[[], float]) -> None:
        self._lifetime_seconds = lifetime_seconds
        self._clock = clock
        self._entries: collections.OrderedDict[int, tuple[float, TransferFailure]]
        self._entries = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, room: int, failure: TransferFailure) -> None:
        """Remembers why a room failed; the oldest room is forgotten when there are too many."""
        self._entries.pop(room, None)
        self._entries[room] = (self._clock() + self._lifetime_seconds, failure)
        if len(self._entries) > _MAX_TOMBSTONES:
            self._entries.popitem(last=False)

    def take(self, room: int) -> TransferFailure | None:
        """Returns and forgets why a room failed, or None. Each tombstone answers one late leg."""
        until, failure = self._entries.pop(room, (0.0, None))
        return failure if until > self._clock() else None

    def expire(self) -> None:
        """Forgets what is no longer expected."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)


def sendable(failure: TransferFailure) -> TransferFailure:
    """Returns a failure that fits into a message: text within limits, a status that is an error."""
    status = failure.status if 400 <= failure.status <= 599 else 503
    return TransferFailure(clip_reason(failure.reason), status)


def check_extra(extra: object) -> None:
    """Checks values that a scheduler wants to send along.

    Args:
        extra: Plain data.

    Raises:
        ValueError: If it is too large or not plain data.
    """
    try:
        size = len(msgspec.msgpack.encode(extra))
    except (TypeError, OverflowError, UnicodeError) as error:
        raise ValueError(f"cannot be sent to the peer: {error}") from error
    if size > _EXTRA_BYTES_LIMIT:
        raise ValueError(f"takes {size} bytes in a message, the limit is {_EXTRA_BYTES_LIMIT}")
