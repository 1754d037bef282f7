# SPDX-License-Identifier: Apache-2.0
import math
import time

import hypothesis
from hypothesis import strategies

from kvferry.control.messages import EngineInfo, Instance
from kvferry.control.room_registry import InstanceRegistry
from kvferry.tests.control.pairs import LAYOUT


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def instance(name: str, port: int = 9600, generation: int = 1, role: str = "prefill") -> Instance:
    return Instance(
        instance_id=name,
        generation=generation,
        role=role,  # type: ignore[arg-type]
        host="127.0.0.1",
        side_channel_port=port,
        layout=LAYOUT,
        engine=EngineInfo(name="fake", address="a"),
    )


def test_the_only_instance_is_found_for_any_room() -> None:
    registry = InstanceRegistry(3.0, Clock())
    assert registry.find(1) is None
    assert registry.register(instance("a")) is None
    assert registry.find(1) == instance("a")
    assert registry.find(1, only=False) is None
    assert registry.find(1, "a") == instance("a")
    assert registry.find(1, "b") is None


def test_of_several_the_one_that_announced_is_found() -> None:
    registry = InstanceRegistry(3.0, Clock())
    registry.register(instance("a", 1))
    registry.register(instance("b", 2))
    assert registry.find(5) is None
    assert registry.announce("b", [5, 6])
    assert not registry.announce("unknown", [7])
    assert registry.find(5) == instance("b", 2)
    registry.retract("a", [5])  # Not a's room: ignored.
    assert registry.find(5) == instance("b", 2)
    registry.retract("b", [5])
    assert registry.find(5) is None
    assert registry.num_rooms == 1
    registry.announce("a", [6])  # The later announcement holds.
    assert registry.find(6) == instance("a", 1)


def test_a_lease_ends_without_heartbeats() -> None:
    clock = Clock()
    registry = InstanceRegistry(3.0, clock)
    assert registry.next_expiry_seconds == math.inf
    registry.register(instance("b", 2))
    registry.register(instance("a", 1))
    registry.announce("a", [1])
    clock.now = 2.0
    assert registry.next_expiry_seconds == 1.0
    assert registry.heartbeat("b", 1)
    assert not registry.heartbeat("b", 9)  # Another generation.
    clock.now = 2.9
    assert registry.expire() == []
    clock.now = 3.0
    assert [each.instance_id for each in registry.expire()] == ["a"]
    assert registry.next_expiry_seconds == 2.0
    assert not registry.heartbeat("a", 1)
    assert registry.num_rooms == 0
    assert registry.find(1) == instance("b", 2)  # Now the only one.


def test_a_restarted_process_replaces_its_old_self_at_once() -> None:
    registry = InstanceRegistry(3.0, Clock())
    registry.register(instance("old", generation=5))
    registry.announce("old", [1])
    assert registry.register(instance("new", generation=6)) is None
    assert registry.num_instances == 1 and registry.num_rooms == 0
    assert registry.find(1) == instance("new", generation=6)
    assert "newer process" in str(registry.register(instance("older", generation=5)))
    assert not registry.withdraw("old", 5)
    assert registry.withdraw("new", 6)
    assert registry.num_instances == 0


def test_registering_again_keeps_the_rooms() -> None:
    registry = InstanceRegistry(3.0, Clock())
    registry.register(instance("a", 1))
    registry.register(instance("b", 2))
    registry.announce("a", [1])
    registry.register(instance("a", 1))
    assert registry.find(1) == instance("a", 1)


def test_decode_servers_do_not_register() -> None:
    registry = InstanceRegistry(3.0, Clock())
    assert "decode" in str(registry.register(instance("d", role="decode")))


def test_cost_per_room_does_not_grow() -> None:
    def fill(count: int) -> float:
        registry = InstanceRegistry(3.0, Clock())
        for number in range(200):
            registry.register(instance(str(number), number + 1))
        start = time.perf_counter()
        for room in range(count):
            registry.announce(str(room % 200), [room])
            assert registry.find(room) is not None
        return (time.perf_counter() - start) / count

    fill(100)
    assert fill(20_000) < 20 * fill(1000)


def test_rooms_per_instance_are_bounded() -> None:
    registry = InstanceRegistry(3.0, Clock())
    registry.register(instance("a", 1))
    registry.register(instance("b", 2))
    for start in range(0, 200_000, 50_000):
        registry.announce("a", list(range(start, start + 50_000)))
    assert registry.num_rooms == 65536
    assert registry.find(0) is None and registry.find(199_999) == instance("a", 1)


_NAMES = strategies.sampled_from(["a", "b", "c"])
_STEPS = strategies.lists(
    strategies.one_of(
        strategies.tuples(
            strategies.just("register"),
            _NAMES,
            strategies.integers(1, 2),
            strategies.integers(1, 3),
        ),
        strategies.tuples(strategies.just("withdraw"), _NAMES, strategies.integers(1, 3)),
        strategies.tuples(strategies.just("announce"), _NAMES, strategies.integers(0, 5)),
        strategies.tuples(strategies.just("retract"), _NAMES, strategies.integers(0, 5)),
        strategies.tuples(strategies.just("wait"), strategies.floats(0, 4)),
    ),
    max_size=40,
)


@hypothesis.settings(max_examples=200)
@hypothesis.given(_STEPS)
def test_any_order_of_messages_keeps_the_tables_in_step(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    clock = Clock()
    registry = InstanceRegistry(3.0, clock)
    for step, *values in steps:
        match step:
            case "register":
                name, port, generation = values
                registry.register(instance(name, port, generation))
            case "withdraw":
                registry.withdraw(*values)
            case "announce":
                registry.announce(values[0], [values[1]])
            case "retract":
                registry.retract(values[0], [values[1]])
            case "wait":
                clock.now += values[0]
                registry.expire()
        entries = registry._entries
        assert len(registry._by_address) == len(entries)
        held = {room: name for name, entry in entries.items() for room in entry.rooms}
        assert held == registry._room_holder
