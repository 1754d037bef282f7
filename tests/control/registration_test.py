# SPDX-License-Identifier: Apache-2.0
"""A prefill server finds its bootstrap server again, also under another address."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.messages import HeartbeatAck, Message, Ping, Pong, Register, Registered
from kvferry.control.wire import decode, encode
from kvferry.control.zmq_connection import ControlOptions, create_manager
from kvferry.tests.control.bootstrap_test import OPTIONS, Clients
from kvferry.tests.control.pairs import LAYOUT, Pool, wait_until
from kvferry.tests.control.room_registry_test import instance

NAME = "bootstrap.example"


class NameService:
    """Knows one name; fails if it has no addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.threads: set[str] = set()

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        assert host == NAME
        self.threads.add(threading.current_thread().name)
        if not self.addresses:
            raise OSError("no answer")
        return [(0, 0, 0, "", (address, 0)) for address in self.addresses]


@pytest.fixture(name="service")
def _service(monkeypatch: pytest.MonkeyPatch) -> NameService:
    service = NameService("127.0.0.1")
    monkeypatch.setattr("socket.getaddrinfo", service.getaddrinfo)
    return service


@contextlib.contextmanager
def bootstrap(host: str, port: int = 0) -> Iterator[ZmqBootstrapServer]:
    server = ZmqBootstrapServer(host, port, options=OPTIONS)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(name="clients")
def _clients() -> Iterator[Clients]:
    clients = Clients(0)
    yield clients
    clients.stop()


def test_a_server_that_has_moved_is_found_by_its_name(
    service: NameService, clients: Clients
) -> None:
    with bootstrap("127.0.0.1") as first:
        clients.port = first.port
        registration = clients.register(instance("a"), [7], NAME)
        wait_until(lambda: registration.registered)
    wait_until(lambda: not registration.registered)
    service.addresses = ["127.0.0.3", "127.0.0.2"]  # Nobody is at the first one.
    with bootstrap("127.0.0.2", clients.port) as second:
        wait_until(lambda: registration.registered)
        wait_until(lambda: second.counters()["bootstrap_rooms"] == 1)
        assert registration.problem is None
    assert service.threads == {"resolve-0"}  # Not the control loop's.


def test_the_last_addresses_do_when_the_name_service_is_lost_too(
    service: NameService, clients: Clients
) -> None:
    with bootstrap("127.0.0.1") as first:
        clients.port = first.port
        registration = clients.register(instance("a"), [], NAME)
        wait_until(lambda: registration.registered)
        service.addresses.clear()
    wait_until(lambda: not registration.registered)
    with bootstrap("127.0.0.1", clients.port):
        wait_until(lambda: registration.registered)


def test_a_name_that_is_unknown_at_first_is_looked_up_again(
    service: NameService, clients: Clients
) -> None:
    service.addresses.clear()
    with bootstrap("127.0.0.1") as server:
        clients.port = server.port
        registration = clients.register(instance("a"), [], NAME)
        problem = f"bootstrap server {NAME}:{server.port}: host name '{NAME}' cannot be resolved"
        wait_until(lambda: problem in str(registration.problem))
        service.addresses = ["127.0.0.1"]
        wait_until(lambda: registration.registered)


def test_nothing_happens_after_the_end(service: NameService, clients: Clients) -> None:
    with bootstrap("127.0.0.1") as server:
        clients.port = server.port
        release = threading.Event()
        assert clients.resolver.submit(lambda: _wait(release), lambda error: None)
        registration = clients.register(instance("a"), [], NAME)
        clients.call(registration.close)
        release.set()
        wait_until(lambda: clients.resolver.pending == 0)
        clients.call(lambda: None)
        assert server.counters()["bootstrap_instances"] == 0 and not registration.registered


def test_a_prefill_server_follows_its_bootstrap_server(service: NameService) -> None:
    with contextlib.ExitStack() as stack:
        with bootstrap("127.0.0.1") as first:
            manager = create_manager(
                "prefill",
                options=ControlOptions(
                    bootstrap_host=NAME, bootstrap_port=first.port, peer_timeout_seconds=0.5
                ),
                layout=LAYOUT,
                pages=Pool(),
                engine=FakeEngine(EngineOptions(), FakeNetwork()),
                on_event=lambda: None,
            )
            manager.start()
            stack.callback(manager.stop)
            wait_until(lambda: manager.not_ready is None)
        wait_until(lambda: manager.not_ready is not None)
        service.addresses = ["127.0.0.2"]
        with bootstrap("127.0.0.2", first.port) as second:
            wait_until(lambda: manager.not_ready is None)
            assert second.counters()["bootstrap_instances"] == 1


def test_a_prefill_server_does_not_start_with_a_name_that_is_unknown(service: NameService) -> None:
    service.addresses.clear()
    manager = create_manager(
        "prefill",
        options=ControlOptions(bootstrap_host=NAME, bootstrap_port=9),
        layout=LAYOUT,
        pages=Pool(),
        engine=FakeEngine(EngineOptions(), FakeNetwork()),
        on_event=lambda: None,
    )
    with pytest.raises(OSError, match=f"host name '{NAME}' cannot be resolved"):
        manager.start()


def test_a_lease_that_was_forgotten_is_a_short_gap(clients: Clients) -> None:
    """Not a server that has never been registered, which no router may choose."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        clients.port = router.bind_to_random_port("tcp://127.0.0.1")
        registration = clients.register(instance("a"))
        assert "not registered yet" in str(registration.problem)
        peer, message = _next(router)
        assert isinstance(message, Register)
        _answer(router, peer, Registered(lease_seconds=0.3))
        wait_until(lambda: registration.registered)
        _next(router)  # The first heartbeat.
        _answer(router, peer, HeartbeatAck(known=False))
        _next(router)  # It registers again, and has no answer yet.
        assert not registration.registered and registration.problem is None
        wait_until(lambda: _answer_pings(router) and registration.problem)
        assert "it has forgotten this server" in str(registration.problem)
        _answer(router, peer, Registered(lease_seconds=0.3))
        wait_until(lambda: registration.problem is None)


def _next(router: zmq.Socket[bytes]) -> tuple[bytes, Message]:
    """Returns the next message that is not a ping."""
    while True:
        peer, frame = router.recv_multipart()
        message = decode(frame)
        if not isinstance(message, Ping):
            return peer, message


def _answer_pings(router: zmq.Socket[bytes]) -> bool:
    """Keeps the connection while something else is waited for."""
    while router.poll(0):
        _answer(router, router.recv_multipart()[0], Pong(timeout_seconds=0.6))
    return True


def _answer(router: zmq.Socket[bytes], peer: bytes, message: Message) -> None:
    router.send_multipart([peer, encode(message)])


def _wait(event: threading.Event) -> None:
    event.wait(10.0)
