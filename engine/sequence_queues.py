# SPDX-License-Identifier: Apache-2.0
"""Where every live sequence is: each is in exactly one queue, so an abort always finds it."""

import bisect
from collections.abc import Iterator

from kvferry.engine.sequence import Sequence, SequenceState


class SequenceQueues:
    """All live sequences, by state. Not thread-safe: the step thread owns it.

    Waiting sequences are kept in order of arrival, so one that lost its pages goes before those
    that came later; the other queues keep the order in which they were entered.
    """

    def __init__(self) -> None:
        """Starts with no sequences."""
        self._by_state: dict[SequenceState, list[Sequence]] = {
            state: [] for state in SequenceState if state is not SequenceState.FINISHED
        }

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Queued for prefill, oldest first."""
        return tuple(self._by_state[SequenceState.WAITING])

    @property
    def prefilling(self) -> tuple[Sequence, ...]:
        """Whose prompt is being computed, in order of admission."""
        return tuple(self._by_state[SequenceState.PREFILLING])

    @property
    def running(self) -> tuple[Sequence, ...]:
        """In the decode batch."""
        return tuple(self._by_state[SequenceState.RUNNING])

    def count(self, state: SequenceState) -> int:
        """Returns how many sequences are in a state; safe from any thread.

        Args:
            state: any state but FINISHED.
        """
        return len(self._by_state[state])

    def oldest_waiting(self) -> Sequence | None:
        """Returns the head of the waiting queue, if there is one."""
        waiting = self._by_state[SequenceState.WAITING]
        return waiting[0] if waiting else None

    def num_tokens(self) -> int:
        """Returns how many tokens all live sequences have; safe from any thread."""
        return sum(seq.num_tokens for queue in self._by_state.values() for seq in tuple(queue))

    def live(self) -> tuple[Sequence, ...]:
        """Returns all live sequences in order of arrival."""
        return tuple(sorted(self, key=lambda seq: seq.ticket))

    def admitted(self) -> Iterator[Sequence]:
        """Yields the sequences that hold a running slot, in any state."""
        return (seq for seq in self if seq.admitted)

    def add(self, seq: Sequence) -> None:
        """Takes in a new sequence, in the state it has.

        Args:
            seq: not in any queue.
        """
        self._by_state[seq.state].append(seq)

    def move(self, seq: Sequence, state: SequenceState) -> None:
        """Moves a sequence to the queue of another state; FINISHED takes it out of all.

        Args:
            seq: a live sequence.
            state: where it goes.
        """
        self._by_state[seq.state].remove(seq)
        seq.state = state
        if state is SequenceState.WAITING:
            bisect.insort(self._by_state[state], seq, key=lambda other: other.ticket)
        elif state is not SequenceState.FINISHED:
            self._by_state[state].append(seq)

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._by_state.values():
            yield from queue
