# SPDX-License-Identifier: Apache-2.0
"""Registration and look-up over real sockets, and what happens when one of them restarts."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.control import bootstrap
from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.control_loop import ControlLoop
from kvferry.control.discovery import Discovery
from kvferry.control.messages import Announce, Heartbeat, Instance, Lookup, Register, Withdraw
from kvferry.control.names import Names
from kvferry.control.registration import Registration
from kvferry.control.security import InsecureBindError, PortInUseError
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.tally import Tally
from kvferry.control.wire import encode
from kvferry.control.workers import WorkerPool
from kvferry.tests.control.pairs import wait_until
from kvferry.tests.control.room_registry_test import instance

OPTIONS = ChannelOptions(peer_timeout_seconds=0.6)


@dataclasses.dataclass
class Answer:
    found: list[Instance] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)

    @property
    def there(self) -> bool:
        return bool(self.found or self.missing)


class Clients:
    """Registrations and look-ups of one process."""

    def __init__(self, port: int, options: ChannelOptions = OPTIONS) -> None:
        self.port = port
        self.loop = ControlLoop("clients")
        self.loop.start()
        self.tally = Tally()
        self.resolver = WorkerPool("resolve", 1, 10)
        self.resolver.start()
        self.options = options
        self.discovery = Discovery(self.loop, self.tally, options, self.resolver)

    def register(
        self,
        registered: Instance,
        rooms: list[int] | None = None,
        host: str = "127.0.0.1",
    ) -> Registration:
        made = Registration(
            self.loop,
            self.tally,
            self.options,
            Names(self.loop, self.resolver),
            (host, self.port),
            registered,
            lambda: rooms or [],
        )
        self.loop.call(made.open)
        return made

    def find(self, room: int, host: str = "127.0.0.1") -> Answer:
        answer = Answer()
        self.loop.call(
            lambda: self.discovery.find(
                host, self.port, room, answer.found.append, answer.missing.append
            )
        )
        return answer

    def call(self, action: Callable[[], Any]) -> None:
        self.loop.call(action)

    def stop(self) -> None:
        self.loop.call(self.discovery.close)
        self.loop.stop()
        self.resolver.stop()


def start(port: int = 0) -> ZmqBootstrapServer:
    server = ZmqBootstrapServer("127.0.0.1", port, options=OPTIONS)
    server.start()
    return server


@pytest.fixture(name="server")
def _server() -> Iterator[ZmqBootstrapServer]:
    server = start()
    yield server
    server.stop()


@pytest.fixture(name="clients")
def _clients(server: ZmqBootstrapServer) -> Iterator[Clients]:
    clients = Clients(server.port)
    yield clients
    clients.stop()


def test_register_look_up_withdraw(server: ZmqBootstrapServer, clients: Clients) -> None:
    registration = clients.register(instance("a"))
    wait_until(lambda: registration.registered)
    answer = clients.find(1)
    wait_until(lambda: answer.there)
    assert answer.found == [instance("a")]
    clients.call(registration.close)
    wait_until(lambda: server.counters()["bootstrap_instances"] == 0)


def test_the_announced_room_is_found_among_several(clients: Clients) -> None:
    first, second = clients.register(instance("a", 1)), clients.register(instance("b", 2))
    wait_until(lambda: first.registered and second.registered)
    early = clients.find(5)  # Decode is first: it waits for the announcement.
    time.sleep(0.1)
    assert not early.there
    clients.call(lambda: second.announce(5))
    wait_until(lambda: early.there)
    assert early.found == [instance("b", 2)]
    late = clients.find(5)
    wait_until(lambda: late.there)
    assert late.found == [instance("b", 2)]
    clients.call(lambda: second.retract(5))
    gone = clients.find(5)
    time.sleep(0.1)
    assert not gone.there


def test_heartbeats_keep_a_lease_and_silence_ends_it(
    server: ZmqBootstrapServer, clients: Clients
) -> None:
    another = Clients(server.port)
    kept, lost = clients.register(instance("a", 1)), another.register(instance("b", 2))
    wait_until(lambda: kept.registered and lost.registered)
    another.loop.stop()  # As a killed process: nothing is withdrawn.
    another.resolver.stop()
    limit = OPTIONS.peer_timeout_seconds + 0.3
    assert wait_until(lambda: server.counters()["bootstrap_instances"] == 1) < limit
    time.sleep(2 * OPTIONS.peer_timeout_seconds)
    assert server.counters()["bootstrap_instances"] == 1


def test_a_restarted_server_is_registered_with_again(clients: Clients) -> None:
    first = start()
    clients.port = first.port
    registration = clients.register(instance("a", 1), rooms=[3])
    other = clients.register(instance("b", 2))
    wait_until(lambda: registration.registered and other.registered)
    assert registration.problem is None
    first.stop()
    wait_until(lambda: not registration.registered)
    assert registration.problem is None  # It may be back soon,
    wait_until(lambda: registration.problem)  # or not.
    assert f"127.0.0.1:{first.port}" in str(registration.problem)
    second = start(first.port)
    answer = clients.find(3)  # Asked before anyone is back: it waits, whoever is back first.
    wait_until(lambda: answer.there, 3.0)
    assert answer.found == [instance("a", 1)]
    wait_until(lambda: registration.registered and other.registered, 3.0)
    assert second.counters()["bootstrap_rooms"] == 1
    second.stop()


def test_a_server_that_has_forgotten_an_instance_is_told_again(
    server: ZmqBootstrapServer, clients: Clients
) -> None:
    registration = clients.register(instance("a"))
    wait_until(lambda: registration.registered)
    server._loop.call(lambda: server._registry.withdraw("a", 1))
    assert server.counters()["bootstrap_instances"] == 0
    wait_until(lambda: server.counters()["bootstrap_instances"] == 1, 2.0)


def test_nobody_registered_is_said_soon(server: ZmqBootstrapServer, clients: Clients) -> None:
    answer = clients.find(1)
    assert wait_until(lambda: answer.there, 2.0) < 1.0
    assert (
        f"no prefill server is registered with the bootstrap server 127.0.0.1:{server.port}"
        in (answer.missing[0])
    )


def test_a_dead_server_is_said_at_once(server: ZmqBootstrapServer, clients: Clients) -> None:
    registrations = [clients.register(instance("a", 1)), clients.register(instance("b", 2))]
    wait_until(lambda: all(each.registered for each in registrations))
    waiting = clients.find(7)
    time.sleep(0.1)
    assert not waiting.there
    server.stop()
    assert wait_until(lambda: waiting.there) < 0.5
    assert "closed by the peer" in waiting.missing[0]
    again = clients.find(7)
    assert wait_until(lambda: again.there) < 0.5
    assert "refused" in again.missing[0]


def test_names_are_resolved(clients: Clients) -> None:
    registration = clients.register(instance("a"))
    wait_until(lambda: registration.registered)
    answer = clients.find(1, host="localhost")
    wait_until(lambda: answer.there)
    assert answer.found
    wrong = clients.find(1, host="no-such-host.invalid")
    wait_until(lambda: wrong.there)
    assert "'no-such-host.invalid' cannot be resolved" in wrong.missing[0]


def test_a_registration_with_a_wildcard_is_not_used(clients: Clients) -> None:
    registration = clients.register(msgspec.structs.replace(instance("a"), host="0.0.0.0"))
    wait_until(lambda: registration.registered)
    answer = clients.find(1)
    wait_until(lambda: answer.there)
    assert "registration is unusable" in answer.missing[0] and "0.0.0.0" in answer.missing[0]


def test_foreign_messages_are_counted(server: ZmqBootstrapServer, clients: Clients) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 200)
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        dealer.send(b"rubbish")
        dealer.send(encode(Heartbeat(instance_id="nobody", generation=1)))
        dealer.send(encode(Withdraw(instance_id="nobody", generation=1)))
        dealer.send(encode(Announce(instance_id="nobody", rooms=[1])))
        dealer.send(encode(Register(instance=instance("d", role="decode"))))
        dealer.send(encode(Lookup(query=1, room=1, instance_id="nobody")))
        wait_until(lambda: server.counters().get("bootstrap_ignored_unknown_instance") == 2)
        answers = [dealer.recv() for _ in range(3)]
    assert b"only prefill servers register here" in answers[1]
    assert b"prefill server nobody is not registered" in answers[2]
    assert server.counters()["bootstrap_ignored_malformed"] == 1
    assert server.failure is None
    registration = clients.register(instance("a"))
    wait_until(lambda: registration.registered)


def test_a_refused_registration_goes_on_trying(
    server: ZmqBootstrapServer, clients: Clients
) -> None:
    newer = clients.register(instance("new", generation=9))
    wait_until(lambda: newer.registered)
    older = clients.register(instance("old", generation=1))
    time.sleep(0.3)
    assert not older.registered
    assert "registration refused" in str(older.problem)
    clients.call(newer.close)
    wait_until(lambda: older.registered, 3.0)
    assert server.counters()["bootstrap_instances"] == 1


def test_ports(server: ZmqBootstrapServer) -> None:
    with pytest.raises(PortInUseError, match="taken by another process"):
        ZmqBootstrapServer("127.0.0.1", server.port).start()
    with pytest.raises(InsecureBindError, match="refusing to listen on 0.0.0.0"):
        ZmqBootstrapServer("0.0.0.0", 0).start()
    with pytest.raises(ValueError, match="not a numeric IP"):
        ZmqBootstrapServer("localhost", 0).start()


def test_its_death_is_seen() -> None:
    server = start()

    def broken() -> None:
        raise KeyError("bug")

    server._loop.post(broken)
    wait_until(lambda: server.failure)
    assert "control thread died: KeyError('bug')" in str(server.failure)
    server.stop()


def test_look_ups_that_wait_are_given_up_and_nothing_is_kept(
    server: ZmqBootstrapServer, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_PARK_SECONDS", 1.0)
    first, second = clients.register(instance("a", 1)), clients.register(instance("b", 2))
    wait_until(lambda: first.registered and second.registered)
    never = [clients.find(5), clients.find(5), clients.find(6)]
    found = clients.find(7)
    wait_until(lambda: server.counters()["bootstrap_parked"] == 4)
    clients.call(lambda: second.announce(7))
    wait_until(lambda: found.there)
    wait_until(lambda: all(answer.there for answer in never), 5.0)
    assert [answer.missing[0] for answer in never] == [
        f"no prefill server has announced room {room}" for room in (5, 5, 6)
    ]
    assert server.counters()["bootstrap_parked"] == 0 and not server._parked


def test_look_ups_do_not_wait_for_servers_that_are_gone(
    server: ZmqBootstrapServer, clients: Clients
) -> None:
    first, second = clients.register(instance("a", 1)), clients.register(instance("b", 2))
    wait_until(lambda: first.registered and second.registered)
    waiting = clients.find(5)
    wait_until(lambda: server.counters()["bootstrap_parked"] == 1)
    clients.call(first.close)
    clients.call(second.close)
    wait_until(lambda: waiting.there)
    # The one that went last stood for all rooms while it was alone, if that was seen.
    assert waiting.found or "no prefill server is registered" in waiting.missing[0]
    assert not server._parked and not server._queue


def test_the_number_of_look_ups_that_wait_is_bounded(
    server: ZmqBootstrapServer, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_MAX_PARKED", 2)
    first, second = clients.register(instance("a", 1)), clients.register(instance("b", 2))
    wait_until(lambda: first.registered and second.registered)
    answers = [clients.find(room) for room in (5, 6, 7)]
    wait_until(lambda: answers[2].there)
    assert answers[2].missing == ["2 look-ups are waiting already"]
    clients.call(lambda: first.announce(5))
    wait_until(lambda: answers[0].there)
    again = clients.find(8)
    wait_until(lambda: server.counters()["bootstrap_parked"] == 2)
    assert not again.there
