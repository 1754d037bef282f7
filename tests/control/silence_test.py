# SPDX-License-Identifier: Apache-2.0
"""Silence is noticed when the peer timeout is over, by both ends, also of half a connection."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvferry.control.control_loop import ControlLoop
from kvferry.control.messages import KVAccept, Ping, Pong
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.silence import SilenceWatch
from kvferry.control.wire import decode, encode
from kvferry.tests.control.fault_proxy import Direction, Proxy
from kvferry.tests.control.pairs import wait_until
from kvferry.tests.control.side_channel_test import Client, Server

# What a loaded machine may add.
MARGIN = 0.3


def patience(seconds: float) -> ChannelOptions:
    return ChannelOptions(peer_timeout_seconds=seconds)


@pytest.fixture(name="start")
def _start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(seconds: float) -> Server:
        servers.append(Server(patience(seconds)))
        return servers[-1]

    yield start
    for server in servers:
        server.loop.stop()


@pytest.fixture(name="connect")
def _connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connect(port: int, seconds: float) -> Client:
        clients.append(Client(port, patience(seconds)))
        wait_until(lambda: clients[-1].up)
        return clients[-1]

    yield connect
    for client in clients:
        client.loop.stop()


def test_each_is_noticed_when_its_own_time_is_over() -> None:
    now = 0.0
    loop = ControlLoop(clock=lambda: now)
    noticed: list[tuple[str, float]] = []
    watch = SilenceWatch[str](loop, 3.0, lambda peer: noticed.append((peer, loop.awake_seconds)))

    def turn(seconds: float) -> None:
        nonlocal now
        now += seconds
        loop.awake_seconds = now
        loop._run_timers()

    for peer in ("a", "b", "c"):
        watch.heard(peer)
        turn(0.5)
    watch.heard("a")
    watch.forget("c")
    assert len(watch) == 2 and "a" in watch and "c" not in watch
    for _ in range(400):
        turn(0.01)
    assert [peer for peer, _ in noticed] == ["b", "a"]
    assert [when for _, when in noticed] == pytest.approx([3.5, 4.5], abs=0.02)
    assert not loop._timers  # With nobody to watch it sleeps.
    watch.heard("d")
    watch.close()
    turn(10.0)
    assert len(noticed) == 2 and not loop._timers


def test_time_in_which_this_process_was_stopped_is_nobodys_silence() -> None:
    now = 0.0
    loop = ControlLoop(clock=lambda: now)
    noticed: list[str] = []
    watch = SilenceWatch[str](loop, 3.0, noticed.append)
    watch.heard("a")
    now = 100.0
    loop.awake_seconds = 0.5
    loop._run_timers()
    assert not noticed and "a" in watch
    now, loop.awake_seconds = 102.5, 3.0
    loop._run_timers()
    assert noticed == ["a"]


def test_the_connecting_end_notices_right_after_the_last_answer(
    connect: Callable[..., Client],
) -> None:
    seconds = 1.2
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        client = connect(router.bind_to_random_port("tcp://127.0.0.1"), seconds)
        began = time.monotonic()
        pings = 0
        while time.monotonic() < began + 2 * seconds:
            peer, frame = router.recv_multipart()
            pings += decode(frame) == Ping()
            router.send_multipart([peer, encode(Pong(timeout_seconds=seconds))])
        assert not client.down
        assert 7 <= pings <= 10  # Four in a timeout, and one at the start: no busy waiting.
        assert seconds - 0.1 < wait_until(lambda: client.down) < seconds + MARGIN
        assert "the peer has been silent for 1.2 s" in client.down[0]


def test_the_listening_end_notices_each_peer_in_time(start: Callable[..., Server]) -> None:
    seconds = 1.2
    server = start(seconds)
    with zmq.Context() as context:
        for _ in range(3):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{server.port}")
            count = len(server.lost)
            dealer.send(encode(Ping()))
            assert decode(dealer.recv()) == Pong(timeout_seconds=seconds)
            noticed = wait_until(lambda count=count: len(server.lost) > count)  # type: ignore[misc]
            assert seconds - 0.1 < noticed < seconds + MARGIN
            assert server.lost[-1] == "has been silent for 1.2 s" and server.channel.num_peers == 0
            dealer.close()


@pytest.mark.parametrize("cut", ["up", "down"])
def test_both_ends_of_half_a_connection_notice_in_time(
    start: Callable[..., Server], connect: Callable[..., Client], cut: Direction
) -> None:
    """Who is not heard, but hears, is told."""
    seconds = 1.0
    server = start(seconds)
    with Proxy() as proxy:
        client = connect(proxy.forward("port", server.port), seconds)
        assert client.send(KVAccept(transfer_id=1))
        wait_until(lambda: server.messages)
        proxy.cut(["port"], [cut])
        hurt = time.monotonic()
        if cut == "down":
            wait_until(lambda: server.lost and client.down)
            assert server.lost == ["has given the connection up: it has heard nothing for 1 s"]
            assert "the peer has been silent" in client.down[0]
        else:
            wait_until(lambda: server.lost and (client.messages or client.down))
        assert time.monotonic() - hurt < seconds + MARGIN


@pytest.mark.parametrize(("ours", "theirs"), [(0.4, 8.0), (8.0, 0.4)])
def test_the_ends_may_differ_in_patience(
    start: Callable[..., Server], connect: Callable[..., Client], ours: float, theirs: float
) -> None:
    server = start(ours)
    client = connect(server.port, theirs)
    time.sleep(5 * min(ours, theirs))  # Nothing to say, for several timeouts.
    assert not server.lost and not client.down and server.channel.num_peers == 1
    # And each end notices by its own.
    if ours < theirs:
        client.loop.stop()
        assert wait_until(lambda: server.lost) < ours + MARGIN
    else:
        release = threading.Event()
        server.loop.post(lambda: _wait(release))
        assert wait_until(lambda: client.down) < theirs + MARGIN
        release.set()


def test_an_absurd_patience_does_not_make_an_end_busy(connect: Callable[..., Client]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        connect(router.bind_to_random_port("tcp://127.0.0.1"), 3.0)
        began, pings = time.monotonic(), 0
        while time.monotonic() < began + 0.5:
            peer, _ = router.recv_multipart()
            pings += 1
            router.send_multipart([peer, encode(Pong(timeout_seconds=1e-9))])
        assert 5 < pings < 25


def _wait(event: threading.Event) -> None:
    event.wait(10.0)
