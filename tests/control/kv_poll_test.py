# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from kvferry.control.kv_poll import (
    LEGAL_TRANSITIONS,
    TERMINAL_STATES,
    IllegalTransitionError,
    KVPoll,
    StateMachine,
    combine,
)

ALL = list(KVPoll)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def machine_in(state: KVPoll, clock: Clock) -> StateMachine:
    machine = StateMachine(clock)
    path = {
        KVPoll.Bootstrapping: [],
        KVPoll.WaitingForInput: [KVPoll.WaitingForInput],
        KVPoll.Transferring: [KVPoll.WaitingForInput, KVPoll.Transferring],
        KVPoll.Success: [KVPoll.WaitingForInput, KVPoll.Transferring, KVPoll.Success],
        KVPoll.Failed: [KVPoll.Failed],
    }[state]
    for step in path:
        assert machine.advance(step)
    return machine


def test_values_are_the_contract() -> None:
    assert [(state.name, int(state)) for state in ALL] == [
        ("Failed", 0),
        ("Bootstrapping", 1),
        ("WaitingForInput", 2),
        ("Transferring", 3),
        ("Success", 4),
    ]


@pytest.mark.parametrize(("start", "target"), list(itertools.product(ALL, ALL)))
def test_every_move(start: KVPoll, target: KVPoll) -> None:
    machine = machine_in(start, Clock())
    if start in TERMINAL_STATES or start is target:
        assert not machine.advance(target)
        assert machine.state is start
    elif (start, target) in LEGAL_TRANSITIONS:
        assert machine.advance(target)
        assert machine.state is target
    else:
        with pytest.raises(IllegalTransitionError, match=f"from {start.name} to {target.name}"):
            machine.advance(target)
        assert machine.state is start


def test_progress_is_a_transition_or_a_touch() -> None:
    clock = Clock()
    machine = StateMachine(clock)
    clock.now += 5
    assert machine.stalled_seconds() == 5
    machine.touch()
    assert machine.stalled_seconds() == 0
    clock.now += 3
    machine.advance(KVPoll.WaitingForInput)
    assert machine.stalled_seconds() == 0
    clock.now += 2
    machine.advance(KVPoll.WaitingForInput)  # No move, so no progress.
    assert machine.stalled_seconds() == 2
    assert machine.entered == {KVPoll.Bootstrapping: 100.0, KVPoll.WaitingForInput: 108.0}


def test_combine_is_the_minimum() -> None:
    for states in itertools.product(ALL, repeat=2):
        assert combine(states) is min(states)
    assert combine([KVPoll.Success, KVPoll.Failed, KVPoll.Transferring]) is KVPoll.Failed
    with pytest.raises(ValueError, match="at least one state"):
        combine([])
