# SPDX-License-Identifier: Apache-2.0
"""Names and addresses of bootstrap servers: what is looked up, what waits, and for how long."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.control import discovery
from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.keys import make_keys
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.workers import WorkerPool
from kvferry.tests.control.bootstrap_test import Answer, Clients
from kvferry.tests.control.pairs import wait_until
from kvferry.tests.control.room_registry_test import instance


class Names:
    """Stands in for the name service: answers from a table, or not at all."""

    def __init__(self) -> None:
        self.table: dict[str, list[str]] = {}
        self.released = threading.Event()
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host)
        if host not in self.table:
            self.released.wait(30.0)
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in self.table[host]]


@pytest.fixture(name="names")
def _names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr("socket.getaddrinfo", names.getaddrinfo)
    yield names
    names.released.set()


@pytest.fixture(name="server", params=["127.0.0.1", "::1"])
def _server(request: pytest.FixtureRequest) -> Iterator[ZmqBootstrapServer]:
    server = ZmqBootstrapServer(request.param, 0)
    server.start()
    yield server
    server.stop()


@pytest.fixture(name="clients")
def _clients(server: ZmqBootstrapServer) -> Iterator[Clients]:
    clients = Clients(server.port, ChannelOptions())
    yield clients
    clients.stop()


def _found(answer: Answer, seconds: float = 5.0) -> bool:
    wait_until(lambda: answer.there, seconds)
    return bool(answer.found)


def _register(clients: Clients, host: str) -> None:
    """Registers an instance that holds rooms 1 and 2."""
    made = clients.register(instance("a"), [1, 2], host)
    wait_until(lambda: made.registered)


def test_the_addresses_of_a_name_are_tried_in_turn(
    server: ZmqBootstrapServer, clients: Clients, names: Names
) -> None:
    _register(clients, "localhost")
    names.table = {"both": ["127.0.0.1", "::1"], "neither": ["127.0.0.2", "127.0.0.3"]}
    assert _found(clients.find(1, host="both"))
    wrong = clients.find(1, host="neither")
    assert not _found(wrong)
    assert f"127.0.0.3:{server.port}" in wrong.missing[0] and "refused" in wrong.missing[0]


def test_addresses_are_not_looked_up_and_may_stand_in_brackets(
    server: ZmqBootstrapServer, clients: Clients, names: Names
) -> None:
    host = "::1" if ":" in server._host else "127.0.0.1"
    _register(clients, host)
    assert _found(clients.find(1, host=host))
    assert _found(clients.find(2, host=f"[{host}]"))
    assert names.asked == [] and len(clients.discovery._servers) == 1


def test_an_address_does_not_wait_for_names(
    server: ZmqBootstrapServer,
    clients: Clients,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.control.names._RESOLVE_SECONDS", 1.0)
    _register(clients, server._host)
    slow, queued = clients.find(1, host="slow"), clients.find(1, host="queued")
    wait_until(lambda: names.asked == ["slow"])  # One thread, as `Clients` has it.
    assert _found(clients.find(1, host=server._host), 0.5)
    assert not slow.there and not queued.there
    assert not _found(slow) and not _found(queued)
    assert "'slow' was not resolved in 1 s, with 1 others waiting" in slow.missing[0]
    assert "name the server by its address" in queued.missing[0]
    names.released.set()
    wait_until(lambda: clients.resolver.pending == 0)
    assert names.asked == ["slow"]  # Nobody waits for the other any more.
    assert not clients.discovery._servers.keys() - {(server._host, server.port)}


def test_names_beyond_the_queue_are_refused_at_once(clients: Clients, names: Names) -> None:
    answers = [clients.find(1, host=f"slow{index}") for index in range(20)]
    refused = [answer for answer in answers if answer.there]
    assert 0 < len(refused) <= 20 - 11  # One runs, ten wait and there is a place for a thread.
    assert all("too many host names are being resolved" in each.missing[0] for each in refused)
    clients.call(clients.discovery.close)
    assert all("shutting down" in each.missing[0] for each in answers if each not in refused)


def test_the_number_of_bootstrap_servers_is_bounded(
    server: ZmqBootstrapServer,
    clients: Clients,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "_MAX_SERVERS", 2)
    answers = [clients.find(1, host=host) for host in ("a", "b", "c")]
    assert [answer.there for answer in answers] == [False, False, True]
    assert "2 bootstrap servers are in use" in answers[2].missing[0]
    clients.call(clients.discovery.close)
    _register(clients, server._host)
    assert _found(clients.find(1, host=server._host))
    clients.find(1, host="a")
    assert not clients.find(1, host="b").there  # In place of the one that nobody waits for.
    assert {host for host, _ in clients.discovery._servers} == {"a", "b"}


def test_text_that_is_no_name_is_refused_with_a_reason(clients: Clients) -> None:
    for host in ("x" * 300, "a\0b", "\ud800", "[no-such-host.invalid]"):
        answer = clients.find(1, host=host)
        assert not _found(answer)
        assert "cannot be resolved" in answer.missing[0]


def test_without_keys_nothing_is_asked_beyond_loopback(clients: Clients, names: Names) -> None:
    names.table = {"far": ["192.0.2.1", "2001:db8::1"]}
    for host in ("192.0.2.1", "far"):
        answer = clients.find(1, host=host)
        assert not _found(answer, 1.0)
        assert "without CURVE keys anyone could answer there" in answer.missing[0]


def test_other_keys_are_said_in_the_answer() -> None:
    ours = ChannelOptions(peer_timeout_seconds=0.6, keys=make_keys())
    server = ZmqBootstrapServer("127.0.0.1", 0, options=ours)
    server.start()
    clients = Clients(server.port, ChannelOptions())
    answer = clients.find(1)
    assert not _found(answer)
    assert "this process has no --curve_key_file" in answer.missing[0]
    resolver = WorkerPool("none", 1, 1)
    clients.discovery = discovery.Discovery(clients.loop, clients.tally, ours, resolver)
    same = clients.find(1)
    assert not _found(same)
    assert "no prefill server is registered" in same.missing[0]
    clients.stop()
    server.stop()
