# SPDX-License-Identifier: Apache-2.0
"""Clients that say anything in any order to a real bootstrap server, over its socket."""

from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest
import zmq
from hypothesis import strategies

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.messages import (
    Announce,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Ping,
    Pong,
    Refused,
    Register,
    Registered,
    Retract,
    Withdraw,
)
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.wire import decode, encode
from kvferry.tests.control.pairs import wait_until
from kvferry.tests.control.room_registry_test import instance

_NAMES = ("a", "b", "c")
_GENERATIONS = range(3)
_ROOMS = range(4)
# Leases run out while the long test runs, and not in the middle of what is checked.
_OPTIONS = ChannelOptions(peer_timeout_seconds=2.0)


class Client:
    """A connection that says what it is told to, and reads what it is answered."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.answers: list[Message] = []
        self._unanswered = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, said: Message | Sequence[bytes]) -> None:
        self._unanswered += isinstance(said, Ping)
        frames = [encode(said)] if not isinstance(said, Sequence) else said
        self._socket.send_multipart(frames)

    def heard(self) -> list[Message]:
        """Waits until everything sent was dealt with; returns all answers so far."""
        self.send(Ping())
        while self._unanswered:
            assert self._socket.poll(10_000), "the bootstrap server does not answer"
            answer = decode(self._socket.recv())
            if isinstance(answer, Pong):
                self._unanswered -= 1
            else:
                self.answers.append(answer)
        return self.answers


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[ZmqBootstrapServer]:
    made = ZmqBootstrapServer("127.0.0.1", 0, options=_OPTIONS)
    made.start()
    wait_until(lambda: made.settled)
    yield made
    made.stop()


def _messages() -> strategies.SearchStrategy[Message]:
    name, generation = strategies.sampled_from(_NAMES), strategies.sampled_from(_GENERATIONS)
    room = strategies.sampled_from(_ROOMS)
    rooms = strategies.lists(room, max_size=5)
    told: list[strategies.SearchStrategy[Any]] = [
        strategies.builds(
            lambda name, generation, port, role: Register(
                instance=instance(name, port, generation, role)
            ),
            name,
            generation,
            strategies.integers(1, 2),
            strategies.sampled_from(["prefill", "prefill", "prefill", "decode"]),
        ),
        strategies.builds(Heartbeat, instance_id=name, generation=generation),
        strategies.builds(Withdraw, instance_id=name, generation=generation),
        strategies.builds(Announce, instance_id=name, rooms=rooms),
        strategies.builds(Retract, instance_id=name, rooms=rooms),
        strategies.builds(
            Lookup,
            query=strategies.integers(0, 99),
            room=room,
            instance_id=strategies.none() | name,
        ),
        strategies.builds(Ping),
        strategies.just(Hello(instance=instance("a"))),
        strategies.just(LookupReply(query=1, reason="x")),
        strategies.just(Registered(lease_seconds=1.0)),
    ]
    return strategies.one_of(told)


def _said(most: int) -> strategies.SearchStrategy[list[tuple[int, Any]]]:
    """Returns what two clients say: messages, broken ones, and any frames."""

    def broken(message: Message, place: int, bit: int) -> list[bytes]:
        frame = bytearray(encode(message))
        frame[place % len(frame)] ^= 1 << bit
        return [bytes(frame)]

    some = _messages()
    flipped = strategies.builds(
        broken, some, strategies.integers(0, 500), strategies.integers(0, 7)
    )
    frames = strategies.lists(strategies.binary(max_size=40), min_size=1, max_size=4)
    said = strategies.one_of(some, some, some, some, flipped, frames)
    return strategies.lists(strategies.tuples(strategies.integers(0, 1), said), max_size=most)


def _play(server: ZmqBootstrapServer, said: Sequence[tuple[int, Any]]) -> None:
    clients = [Client(server.port) for _ in range(2)]
    for who, what in said:
        clients[who].send(what)
    asked = sum(isinstance(what, Lookup) for _, what in said)
    for client in clients:
        client.heard()
    good = Client(server.port)
    for name in _NAMES:
        for generation in _GENERATIONS:
            good.send(Withdraw(instance_id=name, generation=generation))
    good.heard()
    # Who still waited is told that there is nobody left with the next look at the leases.
    wait_until(lambda: not any(server.counters()[f"bootstrap_{name}"] for name in _HELD))
    for client in clients:
        replies = [each for each in client.heard() if isinstance(each, LookupReply)]
        kinds = (LookupReply, HeartbeatAck, Registered, Refused)
        assert all(isinstance(each, kinds) for each in client.answers)
        asked -= len(replies)
        client.close()
    # Broken ones may still be valid look-ups.
    assert asked <= 0, "a look-up has no answer"
    _find_one(good)
    good.close()
    assert server.failure is None


_HELD = ("instances", "rooms", "parked")


def _find_one(client: Client) -> None:
    """Registers, announces and looks up; leaves nothing."""
    there = [instance("good", 7), instance("other", 8)]
    for each in there:
        client.send(Register(instance=each))
        client.send(Announce(instance_id=each.instance_id, rooms=[each.side_channel_port]))
    client.answers.clear()
    client.send(Lookup(query=5, room=7))
    client.send(Lookup(query=6, room=8))
    replies = [each for each in client.heard() if isinstance(each, LookupReply)]
    assert [(each.query, each.instance) for each in replies] == [(5, there[0]), (6, there[1])]
    for each in there:
        client.send(Withdraw(instance_id=each.instance_id, generation=each.generation))
    client.heard()


@hypothesis.settings(max_examples=200)
@hypothesis.given(_said(40))
def test_clients_say_anything(server: ZmqBootstrapServer, said: list[tuple[int, Any]]) -> None:
    _play(server, said)


@pytest.mark.slow
@hypothesis.settings(max_examples=2000)
@hypothesis.given(_said(150))
def test_clients_say_more(server: ZmqBootstrapServer, said: list[tuple[int, Any]]) -> None:
    _play(server, said)
