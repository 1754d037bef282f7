# SPDX-License-Identifier: Apache-2.0
"""Real sockets: silence, refused and closed connections, and bytes that are no message."""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import zmq
from hypothesis import strategies

from kvferry.control import sockets
from kvferry.control.control_loop import ControlLoop
from kvferry.control.keys import make_keys
from kvferry.control.messages import (
    HeartbeatAck,
    HelloWanted,
    KVAccept,
    Message,
    Ping,
    Refused,
    Touched,
)
from kvferry.control.security import CurveKeys, InsecureBindError, PortInUseError
from kvferry.control.side_channel import ChannelOptions, ClientChannel, ServerChannel
from kvferry.control.tally import Tally
from kvferry.control.wire import decode, encode
from kvferry.tests.control.pairs import wait_until

OPTIONS = ChannelOptions(peer_timeout_seconds=0.6)


class Server:
    """A server channel on its own loop that records what it gets, and can echo."""

    def __init__(self, options: ChannelOptions = OPTIONS, host: str = "127.0.0.1") -> None:
        self.loop = ControlLoop("server")
        self.tally = Tally()
        self.messages: list[tuple[bytes, Message]] = []
        self.lost: list[str] = []
        self.channel = ServerChannel(
            self.loop,
            self.tally,
            options,
            lambda peer, message: self.messages.append((peer, message)),
            self._lose,
        )
        self.loop.start()
        self.port = self.loop.call(lambda: self.channel.open(host, 0))

    def _lose(self, peer: bytes, why: str) -> None:
        self.lost.append(why)
        self.channel.send(peer, HelloWanted())  # As a prefill server does.


class Client:
    def __init__(self, port: int, options: ChannelOptions = OPTIONS, host: str = "127.0.0.1"):
        self.loop = ControlLoop("client")
        self.tally = Tally()
        self.up: list[float] = []
        self.messages: list[Message] = []
        self.down: list[str] = []
        self.channel = ClientChannel(
            self.loop,
            self.tally,
            options,
            lambda: self.up.append(time.monotonic()),
            self.messages.append,
            self.down.append,
        )
        self.loop.start()
        self.loop.call(lambda: self.channel.open(host, port))

    def send(self, message: Message) -> bool:
        return self.loop.call(lambda: self.channel.send(message))


@pytest.fixture(name="server")
def _server() -> Iterator[Server]:
    server = Server()
    yield server
    server.loop.stop()


@pytest.fixture(name="connect")
def _connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connect(*args: object, **options: object) -> Client:
        clients.append(Client(*args, **options))  # type: ignore[arg-type]
        return clients[-1]

    yield connect
    for client in clients:
        client.loop.stop()


def test_messages_both_ways_and_pings_beyond_the_timeout(
    server: Server, connect: Callable[..., Client]
) -> None:
    client = connect(server.port)
    wait_until(lambda: client.up)
    assert client.send(KVAccept(transfer_id=4))
    wait_until(lambda: server.messages)
    peer, message = server.messages[0]
    assert message == KVAccept(transfer_id=4)
    assert server.loop.call(lambda: server.channel.send(peer, HelloWanted()))
    wait_until(lambda: client.messages == [HelloWanted()])
    time.sleep(2 * OPTIONS.peer_timeout_seconds)
    assert not client.down and not server.lost and server.channel.num_peers == 1
    assert not server.tally.snapshot() and not client.tally.snapshot()


def test_a_refused_connection_is_down_at_once(connect: Callable[..., Client]) -> None:
    client = connect(1)
    assert wait_until(lambda: client.down) < 0.5
    assert "refused" in client.down[0] and "127.0.0.1:1" in client.down[0]
    assert not client.send(Ping())


def test_a_server_that_never_speaks_is_given_up(connect: Callable[..., Client]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = connect(mute.getsockname()[1], ChannelOptions(connect_timeout_seconds=0.2))
        wait_until(lambda: client.down, 2.0)
        assert "no connection within 0.2 s" in client.down[0]


def test_a_closed_server_is_noticed_at_once(connect: Callable[..., Client]) -> None:
    server = Server()
    client = connect(server.port)
    wait_until(lambda: client.up)
    server.loop.stop()
    assert wait_until(lambda: client.down) < 0.3
    assert "closed by the peer" in client.down[0]


def test_a_silent_client_is_noticed(server: Server, connect: Callable[..., Client]) -> None:
    client = connect(server.port)
    wait_until(lambda: client.up)
    client.send(Ping())
    wait_until(lambda: server.channel.num_peers == 1)
    client.loop.stop()
    assert wait_until(lambda: server.lost, 3.0) < 1.5
    assert server.channel.num_peers == 0


def test_a_closed_client_is_noticed_at_once(connect: Callable[..., Client]) -> None:
    patient = ChannelOptions(peer_timeout_seconds=60.0)
    server = Server(patient)
    stays, goes = (connect(server.port, patient) for _ in range(2))
    wait_until(lambda: server.channel.num_peers == 2)
    goes.loop.call(goes.channel.close)
    assert wait_until(lambda: server.lost) < 1.0
    assert server.lost == ["has closed the connection"] and server.channel.num_peers == 1
    assert not stays.down
    server.loop.stop()


def test_what_a_client_says_before_it_closes_comes_first(connect: Callable[..., Client]) -> None:
    server = Server(ChannelOptions(peer_timeout_seconds=60.0))
    client = connect(server.port)
    wait_until(lambda: client.up)
    stop = threading.Event()
    server.loop.post(lambda: _wait(stop))  # Busy while all of it comes.
    for number in range(900):
        assert client.send(Touched(transfer_ids=[number]))
    client.loop.call(lambda: client.channel.close(5.0))
    stop.set()
    wait_until(lambda: server.lost)
    assert len(server.messages) == 900
    server.loop.stop()


def test_a_closed_connection_is_not_taken_for_its_successor(
    connect: Callable[..., Client],
) -> None:
    """The kernel gives the descriptor of a closed connection to the next one."""
    server = Server(ChannelOptions(peer_timeout_seconds=60.0))
    for number in range(30):
        goes = connect(server.port)
        wait_until(lambda: server.channel.num_peers == 1)
        stop = threading.Event()
        server.loop.post(functools.partial(_wait, stop))
        goes.loop.call(goes.channel.close)
        with socket.create_connection(("127.0.0.1", server.port)):
            pass  # A stranger, whose descriptor is free again, too.
        comes = connect(server.port)
        wait_until(lambda comes=comes: comes.up)  # type: ignore[misc]
        stop.set()
        wait_until(lambda number=number: len(server.lost) == 2 * number + 1)  # type: ignore[misc]
        wait_until(lambda: server.channel.num_peers == 1)
        assert comes.send(Touched(transfer_ids=[number]))
        wait_until(lambda number=number: len(server.messages) == number + 1)  # type: ignore[misc]
        comes.loop.call(comes.channel.close)
        wait_until(lambda number=number: len(server.lost) == 2 * number + 2)  # type: ignore[misc]
    server.loop.stop()


def _wait(event: threading.Event) -> None:
    event.wait(10.0)


SERVER_PROGRAM = """
import sys
from kvferry.tests.control.side_channel_test import Server
server = Server()
print(server.port, flush=True)
sys.stdin.read()
"""


def test_a_stopped_server_is_noticed_by_silence(connect: Callable[..., Client]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        client = connect(int(child.stdout.readline()))
        wait_until(lambda: client.up)
        os.kill(child.pid, signal.SIGSTOP)
        assert wait_until(lambda: client.down, 5.0) < 2.0
        assert "silent" in client.down[0]
    finally:
        child.kill()
        child.communicate()


def _raw(port: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 200)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return context, dealer


def test_malformed_frames_are_counted_and_ignored(
    server: Server, connect: Callable[..., Client]
) -> None:
    context, dealer = _raw(server.port)
    dealer.send(b"rubbish")
    dealer.send(b"")
    dealer.send_multipart([b"", encode(Ping())])
    dealer.send_multipart([encode(Ping())] * 3)
    dealer.send(b"kvf\x07" + encode(Ping())[4:])
    dealer.send(encode(KVAccept(transfer_id=1)))
    wait_until(lambda: server.messages)
    assert server.tally.snapshot() == {"ignored_malformed": 4, "ignored_version": 1}
    assert isinstance(decode(dealer.recv()), Refused)  # Told that the versions differ.
    context.destroy()
    client = connect(server.port)
    wait_until(lambda: client.up)
    assert client.send(KVAccept(transfer_id=2))
    wait_until(lambda: len(server.messages) == 2)


def test_a_frame_over_the_limit_costs_its_sender_the_connection(
    server: Server, connect: Callable[..., Client]
) -> None:
    client = connect(server.port)
    context, dealer = _raw(server.port)
    dealer.send(bytes(9 << 20))
    time.sleep(0.3)
    context.destroy()
    assert not server.messages
    wait_until(lambda: client.up)
    assert client.send(KVAccept(transfer_id=2))
    wait_until(lambda: server.messages)


def test_bytes_that_are_not_zmq_do_no_harm(server: Server, connect: Callable[..., Client]) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x00", os.urandom(5000), b""):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(data)
    client = connect(server.port)
    wait_until(lambda: client.up)
    assert client.send(KVAccept(transfer_id=2))
    wait_until(lambda: server.messages)
    assert server.loop.alive


def test_who_connects_and_says_nothing_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", 0.3)
    impatient = Server()
    with socket.create_connection(("127.0.0.1", impatient.port)) as silent:
        silent.settimeout(5.0)
        while silent.recv(1000):  # Its own greeting first.
            pass
    wait_until(lambda: impatient.tally.snapshot() == {"refused_handshakes": 1})
    impatient.loop.stop()


def test_a_client_survives_what_a_server_sends(connect: Callable[..., Client]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = connect(port, ChannelOptions(peer_timeout_seconds=30.0))
        wait_until(lambda: client.up)
        client.send(KVAccept(transfer_id=1))
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"rubbish"])
        router.send_multipart([peer, encode(Ping()), b"more"])
        router.send_multipart([peer, encode(HeartbeatAck(known=True))])
        wait_until(lambda: client.messages)
        assert client.tally.snapshot() == {"ignored_malformed": 2}
        router.send_multipart([peer, b"kvf\x63" + encode(Ping())[4:]])
        wait_until(lambda: client.down)
        assert "protocol version 99" in client.down[0]


@hypothesis.settings(max_examples=15)
@hypothesis.given(strategies.lists(strategies.lists(strategies.binary(max_size=64), min_size=1)))
def test_any_frames_do_no_harm(batches: list[list[bytes]]) -> None:
    server = Server()
    context, dealer = _raw(server.port)
    for frames in batches:
        dealer.send_multipart(frames)
    dealer.send(encode(KVAccept(transfer_id=1)))
    wait_until(lambda: server.messages)
    context.destroy()
    server.loop.stop()
    assert server.loop.failure is None


def test_ports(server: Server) -> None:
    other = ServerChannel(server.loop, Tally(), OPTIONS, lambda *_: None, lambda *_: None)
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{server.port} is taken"):
        server.loop.call(lambda: other.open("127.0.0.1", server.port))
    with pytest.raises(InsecureBindError):
        server.loop.call(lambda: other.open("0.0.0.0", 0))
    with pytest.raises(ValueError, match="peer_timeout_seconds=-1 is not in"):
        ChannelOptions(peer_timeout_seconds=-1)


def test_ipv6(connect: Callable[..., Client]) -> None:
    server = Server(host="::1")
    client = connect(server.port, host="::1")
    wait_until(lambda: client.up)
    assert client.send(KVAccept(transfer_id=2))
    wait_until(lambda: server.messages)
    server.loop.stop()


def test_only_the_same_keys_get_in_and_both_ends_say_so(
    connect: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    keys, others = make_keys(), make_keys()
    server = Server(ChannelOptions(keys=keys))
    client = connect(server.port, ChannelOptions(keys=keys))
    wait_until(lambda: client.up)
    assert client.send(KVAccept(transfer_id=2))
    wait_until(lambda: server.messages)
    without = connect(server.port)
    wait_until(lambda: without.down, 3.0)
    assert "; this process has no --curve_key_file; the other end may have one" in without.down[0]
    wrong = connect(server.port, ChannelOptions(keys=others))
    wait_until(lambda: wrong.down, 3.0)
    assert f"needs the --curve_key_file of this process, keys {others.label}" in wrong.down[0]
    assert not without.up and not wrong.up and len(server.messages) == 1
    wait_until(lambda: server.tally.snapshot() == {"refused_handshakes": 2})
    server.loop.stop()
    assert (
        f"127.0.0.1:{server.port} as we do; the other end needs the --curve_key_file" in caplog.text
    )


def test_a_client_with_keys_does_not_talk_to_a_server_without(
    server: Server, connect: Callable[..., Client]
) -> None:
    client = connect(server.port, ChannelOptions(keys=make_keys()))
    wait_until(lambda: client.down, 3.0)
    assert "the other end needs the --curve_key_file" in client.down[0] and not client.up
    wait_until(lambda: server.tally.snapshot() == {"refused_handshakes": 1})


def test_a_client_that_can_be_told_is_told_that_its_key_is_refused(
    connect: Callable[..., Client],
) -> None:
    class Knows(CurveKeys):
        def secure_client(self, target: zmq.Socket[bytes]) -> None:
            super().secure_client(target)
            target.curve_publickey, target.curve_secretkey = zmq.curve_keypair()

    keys = make_keys()
    server = Server(ChannelOptions(keys=keys))
    knows = Knows(public_key=keys.public_key, secret_key=keys.secret_key)
    client = connect(server.port, ChannelOptions(keys=knows))
    wait_until(lambda: client.down, 3.0)
    assert "the peer refused our key" in client.down[0]
    server.loop.stop()


def test_two_servers_on_one_loop_share_the_gate_and_not_the_keys(
    connect: Callable[..., Client],
) -> None:
    keys, others = make_keys(), make_keys()
    server = Server(ChannelOptions(keys=keys))
    second = ServerChannel(
        server.loop, Tally(), ChannelOptions(keys=others), lambda *_: None, lambda *_: None
    )
    port = server.loop.call(lambda: second.open("127.0.0.1", 0))
    for good, at, bad in ((keys, server.port, others), (others, port, keys)):
        inside = connect(at, ChannelOptions(keys=good))
        outside = connect(at, ChannelOptions(keys=bad))
        wait_until(lambda inside=inside: inside.up, 3.0)  # type: ignore[misc]
        wait_until(lambda outside=outside: outside.down, 3.0)  # type: ignore[misc]
    server.loop.stop()


@pytest.mark.parametrize("host", ["240.0.0.1", "255.255.255.255", "fe80::1%nosuch", "224.0.0.1"])
def test_an_address_that_nobody_can_have_is_down_and_not_a_dead_loop(
    connect: Callable[..., Client], host: str
) -> None:
    options = ChannelOptions(connect_timeout_seconds=0.2, keys=make_keys())
    client = connect(9, options, host=host)
    wait_until(lambda: client.down, 2.0)
    assert client.loop.alive and host in client.down[0]


def test_a_message_that_is_too_long_is_undeliverable_and_nothing_else(
    server: Server, connect: Callable[..., Client]
) -> None:
    client = connect(server.port)
    wait_until(lambda: client.up)
    assert client.send(HelloWanted())
    wait_until(lambda: server.messages)
    peer = server.messages[0][0]
    long = Refused(reason="x" * (9 << 20))
    assert not client.send(long)
    assert not server.loop.call(lambda: server.channel.send(peer, long))
    assert client.tally.snapshot()["undeliverable"] == 1
    assert server.loop.call(lambda: server.channel.send(peer, KVAccept(transfer_id=1)))
    wait_until(lambda: client.messages)


@pytest.mark.parametrize("_", range(5))
def test_what_a_peer_says_before_it_closes_is_heard_however_late(
    connect: Callable[..., Client], _: int
) -> None:
    server = Server()
    client = connect(server.port)
    wait_until(lambda: client.up)
    assert client.send(HelloWanted())
    wait_until(lambda: server.messages)
    busy = threading.Event()
    client.loop.post(lambda: _wait(busy))
    bye = Refused(reason="shutting down")
    assert server.loop.call(lambda: server.channel.send(server.messages[0][0], bye))
    server.loop.call(server.channel.close)
    server.loop.stop()
    busy.set()
    wait_until(lambda: client.down)
    assert client.messages == [bye]
