# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two processes over `jax.experimental.transfer`; and either one dies.

The process under test is the one that lives; the other is a child that is killed, stopped, or
restarted on the same ports.
"""

import functools
import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.connection import KVManager, KVReceiver
from kvferry.control.engines.base import EngineOptions, TransferError
from kvferry.control.engines.registry import create_engine
from kvferry.control.kv_poll import KVPoll
from kvferry.control.zmq_connection import ControlOptions, create_manager
from kvferry.tests.control.pairs import (
    LAYOUT,
    Pool,
    commit_all,
    fails,
    is_baseline,
    metadata,
    reaches,
    wait_until,
)
from kvferry.tests.control.peer_process import PAGE_SHAPE, PeerProcess, peer_process

PEER_TIMEOUT = 1.0
ROOMS = itertools.count(1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Decode:
    """The decode side in this process."""

    def __init__(self, page_shape: tuple[int, ...] = PAGE_SHAPE, *, engine: str = "jax") -> None:
        self.pool = Pool(64, page_shape=page_shape)
        self.manager: KVManager = create_manager(
            "decode",
            options=ControlOptions(
                peer_timeout_seconds=PEER_TIMEOUT,
                orphan_timeout_seconds=5.0,
                pull_timeout_seconds=10.0,
            ),
            layout=LAYOUT,
            pages=self.pool,
            engine=create_engine(engine, EngineOptions(channels=2)),
            on_event=lambda: None,
        )
        self.manager.start()

    def open(self, peer: PeerProcess, pages: list[int]) -> tuple[int, KVReceiver]:
        room = next(ROOMS)
        receiver = self.manager.open_receiver("127.0.0.1", peer.ports["bootstrap"], room)
        receiver.request(pages, prompt_tokens=1)
        return room, receiver

    def ready(self, peer: PeerProcess, pages: list[int]) -> tuple[int, KVReceiver]:
        room, receiver = self.open(peer, pages)
        peer("open", room=room)
        wait_until(lambda: receiver.poll() is not KVPoll.Bootstrapping, what=str(receiver.failure))
        assert receiver.poll() is KVPoll.WaitingForInput, receiver.failure
        return room, receiver

    def transfer(self, peer: PeerProcess, pages: list[int]) -> None:
        room, receiver = self.ready(peer, [63 - page for page in pages])
        cut = len(pages) // 2
        if cut:
            assert peer("send", room=room, pages=pages[:cut], last=False)
        assert peer("send", room=room, pages=pages[cut:], last=True)
        commit_all(receiver)
        wait_until(lambda: peer.state(room) is KVPoll.Success)
        mine = [each.tobytes().hex() for each in self.pool.pages([63 - page for page in pages])]
        assert mine == peer("pages", pages=pages)
        wait_until(lambda: is_baseline(self.manager))
        theirs = peer.counters()
        assert theirs["open_rooms"] == theirs["published_bytes"] == theirs["published_keys"] == 0


@pytest.fixture(name="decode", scope="module")
def _decode() -> Iterator[Decode]:
    decode = Decode()
    yield decode
    decode.manager.stop()


@pytest.fixture(name="peer", scope="module")
def _peer() -> Iterator[PeerProcess]:
    with peer_process(role="prefill", seed=1) as peer:
        yield peer


def test_transfers_are_exact_and_leave_nothing_behind(decode: Decode, peer: PeerProcess) -> None:
    decode.transfer(peer, [0])
    for _ in range(5):
        decode.transfer(peer, list(range(31)))
    files, threads = peer.num_files(), peer("threads")
    for _ in range(20):
        decode.transfer(peer, [5, 3, 9])
    assert peer.num_files() == files and peer("threads") == threads

    # Abort from either side, with pages published.
    for side in ("decode", "prefill"):
        room, receiver = decode.ready(peer, [1, 2])
        assert peer("send", room=room, pages=[0], last=False)
        reaches(receiver, KVPoll.Transferring)
        if side == "decode":
            receiver.abort("the client has left")
            wait_until(functools.partial(peer.has_failed, room), 1.0)
            assert "the client has left" in peer("state", room=room)["reason"]
        else:
            peer("abort", room=room, reason="the client has left")
            assert "the client has left" in fails(receiver, 1.0)
        wait_until(lambda: peer.counters()["published_bytes"] == 0, 1.0)
        wait_until(lambda: is_baseline(decode.manager), 2.0)
    decode.transfer(peer, [7, 8])


def test_prefill_is_killed_and_restarted_on_its_ports(decode: Decode) -> None:
    ports = {
        "bootstrap_port": free_port(),
        "engine_port": free_port(),
        "control": {"side_channel_port": free_port()},
    }
    with peer_process(role="prefill", seed=1, **ports) as peer:
        decode.transfer(peer, [0, 1, 2])
        waiting = [decode.ready(peer, [number]) for number in range(3)]
        early = decode.open(peer, [5])[1]
        room, moving = decode.ready(peer, [10, 11])
        assert peer("send", room=room, pages=[0], last=False)
        peer.kill()
        for receiver in [each for _, each in waiting] + [early, moving]:
            assert "closed by the peer" in fails(receiver, PEER_TIMEOUT)
            assert receiver.failure is not None and receiver.failure.status == 503
        wait_until(lambda: is_baseline(decode.manager), 5.0, str(decode.manager.counters()))
        refused = decode.open(peer, [1])[1]
        assert "refused" in fails(refused, 1.0)
    with peer_process(role="prefill", seed=2, **ports) as successor:
        for _ in range(3):
            decode.transfer(successor, [0, 1, 2])
    assert decode.manager.failure is None


def test_prefill_is_stopped_and_goes_on(decode: Decode, peer: PeerProcess) -> None:
    decode.transfer(peer, [0, 1, 2])
    _, receiver = decode.ready(peer, [1])
    peer.send_signal(signal.SIGSTOP)
    assert "silent" in fails(receiver, PEER_TIMEOUT + 1.5)
    late = decode.open(peer, [1])[1]
    fails(late, PEER_TIMEOUT + 1.5)
    assert is_baseline(decode.manager)
    peer.send_signal(signal.SIGCONT)
    wait_until(lambda: peer.counters()["open_rooms"] == 0, 5.0)
    decode.transfer(peer, [3, 4])


class Prefill:
    """The prefill side in this process, for children that decode."""

    def __init__(self) -> None:
        self.bootstrap = ZmqBootstrapServer("127.0.0.1", 0)
        self.bootstrap.start()
        self.pool = Pool(64, seed=3, page_shape=PAGE_SHAPE)
        self.manager: KVManager = create_manager(
            "prefill",
            options=ControlOptions(
                bootstrap_port=self.bootstrap.port,
                peer_timeout_seconds=PEER_TIMEOUT,
                orphan_timeout_seconds=5.0,
            ),
            layout=LAYOUT,
            pages=self.pool,
            engine=create_engine("jax", EngineOptions(channels=2)),
            on_event=lambda: None,
        )
        self.manager.start()

    def ready(self, peer: PeerProcess, pages: list[int]) -> tuple[int, Any]:
        room = next(ROOMS)
        sender = self.manager.open_sender(room)
        peer("open", room=room, host="127.0.0.1", port=self.bootstrap.port)
        peer("request", room=room, pages=pages)
        wait_until(lambda: sender.poll() is KVPoll.WaitingForInput, what=str(sender.failure))
        return room, sender

    def transfer(self, peer: PeerProcess) -> None:
        room, sender = self.ready(peer, [9, 8, 7])
        assert sender.send([1, 2, 3], last=True, metadata=metadata())

        def step() -> bool:
            peer("commit", room=room)
            return bool(sender.poll() is KVPoll.Success)

        wait_until(step)
        assert [each.tobytes().hex() for each in self.pool.pages([1, 2, 3])] == peer(
            "pages", pages=[9, 8, 7]
        )

    def stop(self) -> None:
        self.manager.stop()
        self.bootstrap.stop()


@pytest.fixture(name="prefill", scope="module")
def _prefill() -> Iterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_dies_or_stops_with_pages_published(prefill: Prefill, number: int) -> None:
    with peer_process(role="decode") as peer:
        prefill.transfer(peer)
        _, waiting = prefill.ready(peer, [1])
        _, moving = prefill.ready(peer, [2, 3])
        peer.send_signal(signal.SIGSTOP)  # So that it does not pull what is published now.
        assert moving.send([0], last=False)
        assert prefill.manager.counters()["published_bytes"] > 0
        if number == signal.SIGKILL:
            peer.kill()
        why = "closed the connection" if number == signal.SIGKILL else "silent"
        for sender in (waiting, moving):
            assert why in fails(sender, PEER_TIMEOUT + 1.5)
        wait_until(lambda: is_baseline(prefill.manager), 2.0)
        if number == signal.SIGSTOP:
            peer.send_signal(signal.SIGCONT)
            wait_until(lambda: peer.counters()["open_rooms"] == 0, 5.0)
            wait_until(lambda: peer.counters()["pending_pulls"] == 0, 5.0)
            prefill.transfer(peer)
    with peer_process(role="decode") as successor:
        prefill.transfer(successor)
    assert prefill.manager.failure is None


def test_memory_of_what_was_published_and_released_returns() -> None:
    with peer_process(role="prefill") as peer:
        peer("publish_and_release", count=2, num_bytes=4 << 20, delivered=True)
        before = peer("trimmed_rss_mib")
        for index in range(4):  # 1 GiB in all.
            peer("publish_and_release", count=64, num_bytes=4 << 20, delivered=index % 2 == 0)
        wait_until(lambda: peer("trimmed_rss_mib") - before < 48, 10.0, "released arrays are kept")


def test_rubbish_on_every_socket_does_no_harm(decode: Decode, peer: PeerProcess) -> None:
    decode.transfer(peer, [0, 1])
    for port in peer.ports.values():
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 200)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            for frames in ([b""], [b"x" * 100_000], [b"kvf\x01\xc1"], [b"a", b"b", b"c"]):
                dealer.send_multipart(frames)
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_until(lambda: peer.counters().get("ignored_malformed", 0) >= 4)
    assert peer("failure") is None
    decode.transfer(peer, [2, 3])


def test_two_prefill_servers_behind_one_bootstrap_server(decode: Decode, peer: PeerProcess) -> None:
    shared = {"bootstrap_port": peer.ports["bootstrap"]}
    with peer_process(role="prefill", seed=8, control=shared) as second:
        for _ in range(3):
            for each in (peer, second):
                decode.transfer(each, [4, 5, 6])


def test_idle_processes_sleep(decode: Decode, peer: PeerProcess) -> None:
    decode.transfer(peer, [0])
    before = peer("cpu_seconds")
    time.sleep(3.0)
    assert (peer("cpu_seconds") - before) / 3.0 < 0.02


_PUBLISHER = """
import sys, jax, numpy as np
from kvferry.control.engines.base import EngineOptions, TransferError
from kvferry.control.engines.registry import create_engine
engine = create_engine("jax", EngineOptions(channels=2))
print(engine.start(), flush=True)
raw = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8)
for key, name in enumerate(sys.argv[1:]):
    kind = jax.numpy.dtype(name)
    arrays = [jax.device_put(np.roll(raw, n).view(kind).reshape(64, -1)) for n in range(3)]
    engine.publish(key, arrays, 60.0)
sys.stdin.read()
"""


def test_each_dtype_is_exact_between_two_processes() -> None:
    """Not through a pool: the engines themselves."""
    dtypes = ["bfloat16", "float32", "uint16"]
    command = [sys.executable, "-c", _PUBLISHER, *dtypes]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    engine = create_engine("jax", EngineOptions(channels=2))
    engine.start()
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    raw = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8)
    for key, dtype in enumerate(dtypes):
        kind = jnp.dtype(dtype)
        shape = (64, (1 << 20) // kind.itemsize // 64)
        pull = engine.pull(address, key, [jax.ShapeDtypeStruct(shape, kind)] * 3, 10.0)
        assert pull.wait(11.0)
        for number, array in enumerate(pull.result()):
            assert np.asarray(array).tobytes() == np.roll(raw, number).tobytes(), dtype
    # A publisher that is killed ends a pull that waits, and no later engine is harmed by it.
    pull = engine.pull(address, 99, [jax.ShapeDtypeStruct((3,), jnp.float32)], 10.0)
    child.kill()
    child.communicate()
    assert wait_until(lambda: pull.wait(0.01)) < 5.0
    with pytest.raises(TransferError, match="pull 99 from"):
        pull.result()
    wait_until(lambda: engine.counters()["draining_pulls"] == 0)
    engine.close()
