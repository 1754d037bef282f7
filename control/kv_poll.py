# SPDX-License-Identifier: Apache-2.0
"""The state of one transfer leg, and the only place that says which moves are legal.

Both legs of a room (sender on the prefill server, receiver on the decode server) run the
same five states. Their numeric order is part of the contract: several ranks, or several
parts of one transfer, agree on a common state by taking the minimum, so that one failed
part fails the whole and the slowest part holds the others back.
"""

import enum
import time
from collections.abc import Callable, Iterable


class KVPoll(enum.IntEnum):
    """State of a transfer leg, ordered so that the minimum of several is their common state."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    @property
    def terminal(self) -> bool:
        """Whether this state is final."""
        return self in TERMINAL_STATES


TERMINAL_STATES: frozenset[KVPoll] = frozenset({KVPoll.Failed, KVPoll.Success})

LEGAL_TRANSITIONS: frozenset[tuple[KVPoll, KVPoll]] = frozenset(
    {
        (KVPoll.Bootstrapping, KVPoll.WaitingForInput),
        (KVPoll.WaitingForInput, KVPoll.Transferring),
        (KVPoll.Transferring, KVPoll.Success),
        (KVPoll.Bootstrapping, KVPoll.Failed),
        (KVPoll.WaitingForInput, KVPoll.Failed),
        (KVPoll.Transferring, KVPoll.Failed),
    }
)


class IllegalTransitionError(RuntimeError):
    """A leg was asked to make a move that is not in `LEGAL_TRANSITIONS`."""


def combine(states: Iterable[KVPoll]) -> KVPoll:
    """Returns the common state of several legs: their minimum.

    Args:
      states: States of the ranks or parts, at least one.

    Returns:
      The smallest of them.

    Raises:
      ValueError: If `states` is empty, because no state is then true of all parts.
    """
    members = list(states)
    if not members:
        raise ValueError("combine() needs at least one state, got none")
    return min(members)


class StateMachine:
    """The state of one leg, with the time of its last progress.

    Not locked: whoever owns the leg guards it.

    Attributes:
      state: Current state.
      progress_at: Clock reading of the last transition or `touch`, in seconds.
      entered: Clock reading at which each state was entered, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Starts in `Bootstrapping`.

        Args:
          clock: Returns the time in seconds; injected by tests.
        """
        self._clock = clock
        now = clock()
        self.state = KVPoll.Bootstrapping
        self.progress_at = now
        self.entered: dict[KVPoll, float] = {self.state: now}

    def advance(self, target: KVPoll) -> bool:
        """Moves to `target`.

        Terminal states are sticky: once there, every further move is refused without an error,
        because a late success of a failed leg (and the reverse) is ordinary, not a bug.

        Args:
          target: The state to enter.

        Returns:
          Whether the state changed. Asking for the current state changes nothing.

        Raises:
          IllegalTransitionError: If the move is not in `LEGAL_TRANSITIONS` and the current
            state is not terminal.
        """
        if self.state.terminal or target is self.state:
            return False
        if (self.state, target) not in LEGAL_TRANSITIONS:
            raise IllegalTransitionError(f"no transition from {self.state.name} to {target.name}")
        self.state = target
        self.touch()
        self.entered[target] = self.progress_at
        return True

    def touch(self) -> None:
        """Records that progress was made now."""
        self.progress_at = self._clock()

    def stalled_seconds(self) -> float:
        """Returns the seconds since the last progress."""
        return self._clock() - self.progress_at
