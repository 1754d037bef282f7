# SPDX-License-Identifier: Apache-2.0
"""Tests that a sequence is in one queue at a time, and of the order within."""

from kvferry.engine.sequence import SequenceState
from kvferry.engine.sequence_queues import SequenceQueues
from kvferry.tests.engine.admission_test import make


def test_one_queue_at_a_time() -> None:
    queues, seq = SequenceQueues(), make(3, 1)
    queues.add(seq)
    for state in (
        SequenceState.WAITING,
        SequenceState.PREFILLING,
        SequenceState.RUNNING,
        SequenceState.HELD,
    ):
        queues.move(seq, state)
        assert seq.state is state
        assert [
            other
            for other in SequenceState
            if other is not SequenceState.FINISHED and queues.count(other)
        ] == [state]
        assert queues.live() == (seq,)
        assert queues.num_tokens() == 3
    queues.move(seq, SequenceState.FINISHED)
    assert queues.live() == () and seq.finished


def test_waiting_is_in_order_of_arrival() -> None:
    queues = SequenceQueues()
    seqs = [make(3, 1, ticket=ticket) for ticket in (4, 2, 9, 1)]
    for seq in seqs:
        queues.add(seq)
        queues.move(seq, SequenceState.WAITING)
    assert queues.oldest_waiting() is seqs[3]
    queues.move(seqs[3], SequenceState.RUNNING)
    assert queues.oldest_waiting() is seqs[1]
    queues.move(seqs[3], SequenceState.WAITING)
    assert queues.oldest_waiting() is seqs[3], "a preempted sequence goes before younger ones"
    assert [seq.ticket for seq in queues.live()] == [1, 2, 4, 9]


def test_admitted_in_any_state() -> None:
    queues = SequenceQueues()
    held, running = make(3, 1, ticket=1), make(3, 1, ticket=2)
    for seq in (held, running):
        queues.add(seq)
    queues.move(running, SequenceState.RUNNING)
    running.admitted = True
    assert list(queues.admitted()) == [running]
    held.admitted = True
    assert len(list(queues.admitted())) == 2
