# SPDX-License-Identifier: Apache-2.0
"""The tcp engine against those who know no live transfer id, say nothing, or say it slowly."""

import hmac
import os
import socket
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines import frames, tcp_server
from kvferry.control.engines.base import EngineOptions, TransferError
from kvferry.control.engines.frames import (
    CHALLENGE_BYTES,
    NONCE_BYTES,
    Request,
    is_proven,
    pack_request,
    prove,
    read_grant,
    tag_of,
)
from kvferry.control.engines.tcp_engine import TcpEngine
from kvferry.tests.control.pairs import wait_until

_KEY = 0x1234_5678_9ABC
_NONCE = bytes(NONCE_BYTES)
_DATA = jnp.arange(1000.0)


class Victim:
    """An engine that has something published, and what attackers do to it."""

    def __init__(self) -> None:
        self.engine = TcpEngine(EngineOptions(channels=2))
        self.address = self.engine.start()
        self.engine.publish(_KEY, [_DATA], 60.0)

    def connect(self) -> tuple[socket.socket, bytes]:
        peer = socket.create_connection(("127.0.0.1", int(self.address.split(":")[1])))
        peer.settimeout(5.0)
        return peer, peer.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)

    def answer(self, peer: socket.socket, request: bytes) -> bytes:
        """What comes back for a request; empty if the connection is closed instead."""
        try:
            peer.sendall(request)
            return peer.recv(1 << 16)
        except ConnectionError:
            return b""

    def pulls(self, key: int, seconds: float = 5.0) -> np.ndarray:
        specs = [jax.ShapeDtypeStruct(_DATA.shape, _DATA.dtype)]
        pull = self.engine.pull(self.address, key, specs, seconds)
        assert pull.wait(seconds + 1.0)
        return np.asarray(pull.result()[0])

    @property
    def threads(self) -> int:
        return sum(each.name == "kv-tcp-serve" for each in threading.enumerate())


@pytest.fixture(name="victim")
def _victim() -> Iterator[Victim]:
    victim = Victim()
    before = victim.threads
    yield victim
    # Whatever was done to it: it serves the one who knows the id, and nobody's thread is left.
    if victim.engine.counters()["published_keys"]:
        np.testing.assert_array_equal(victim.pulls(_KEY), _DATA)
    victim.engine.close()
    wait_until(lambda: victim.threads <= before)


@pytest.mark.parametrize(
    "proof",
    [
        bytes(32),
        os.urandom(32),
        prove(_KEY + 1, bytes(CHALLENGE_BYTES), _NONCE, 0, 1),
        prove(_KEY, bytes(CHALLENGE_BYTES), _NONCE, 0, 1),
    ],
    ids=["zeros", "random", "of another id", "of another challenge"],
)
def test_a_wrong_proof_gets_nothing(victim: Victim, proof: bytes) -> None:
    peer, challenge = victim.connect()
    with peer:
        request = bytearray(pack_request(_KEY, challenge, _NONCE, 0, 1))
        request[20:52] = proof
        assert victim.answer(peer, bytes(request)) == b""


@pytest.mark.parametrize("field", ["nonce", "index", "count"])
def test_a_proof_holds_for_one_stream_of_one_pull(victim: Victim, field: str) -> None:
    peer, challenge = victim.connect()
    with peer:
        request = bytearray(pack_request(_KEY, challenge, _NONCE, 0, 2))
        place = {"nonce": 52, "index": 69, "count": 71}[field]
        request[place] += 1
        assert victim.answer(peer, bytes(request)) == b""


def test_a_recorded_request_is_worth_nothing(victim: Victim) -> None:
    key = _KEY + 7
    victim.engine.publish(key, [_DATA], 60.0)
    peer, challenge = victim.connect()
    with peer:
        recorded = pack_request(key, challenge, _NONCE, 0, 1)
        peer.sendall(recorded)
        assert read_grant(peer, lambda received: None).leaves == [((1000,), "float32")]
    # The id is still live, and its streams are not: neither the same bytes nor another proof help.
    peer, challenge = victim.connect()
    with peer:
        assert victim.answer(peer, recorded) == b""
    peer, challenge = victim.connect()
    with peer:
        again = victim.answer(peer, pack_request(key, challenge, _NONCE, 0, 1))
        assert b"ids are for one use" in again
    victim.engine.release(key, delivered=True)


def test_challenges_do_not_repeat(victim: Victim) -> None:
    seen = set()
    for _ in range(20):
        peer, challenge = victim.connect()
        peer.close()
        seen.add(challenge)
    assert len(seen) == 20


def test_a_stale_id_is_told_so_and_the_stranger_has_to_go(victim: Victim) -> None:
    victim.engine.release(_KEY, delivered=True)
    peer, challenge = victim.connect()
    with peer:
        peer.sendall(pack_request(_KEY, challenge, _NONCE, 0, 1))
        assert "it was released, has expired" in read_grant(peer, lambda received: None).error
        assert peer.recv(1) == b""


def test_the_id_is_not_told() -> None:
    request = pack_request(_KEY, bytes(CHALLENGE_BYTES), _NONCE, 0, 1)
    assert tag_of(_KEY) in request
    assert _KEY.to_bytes(8, "little") not in request and _KEY.to_bytes(8, "big") not in request


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    proof = prove(_KEY, b"c" * 16, _NONCE, 0, 1)
    assert is_proven(Request(tag_of(_KEY), proof, _NONCE, 0, 1), _KEY, b"c" * 16)
    assert compared == [(proof, proof)]


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, bytes(200), b"\xff" * 200, os.urandom(200)],
)
def test_rubbish_ends_the_connection(victim: Victim, data: bytes) -> None:
    peer, _ = victim.connect()
    with peer:
        assert victim.answer(peer, data) == b""


def test_who_says_nothing_has_to_go(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "_STRANGER_SECONDS", 0.5)
    peer, _ = victim.connect()
    with peer:
        started = time.monotonic()
        assert peer.recv(1) == b""
        assert 0.3 < time.monotonic() - started < 2.0


def test_who_speaks_slowly_has_to_go(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "_STRANGER_SECONDS", 0.5)
    peer, challenge = victim.connect()
    request = pack_request(_KEY, challenge, _NONCE, 0, 1)
    started = time.monotonic()
    with peer:
        peer.settimeout(0.1)
        for byte in request:  # A byte every 0.1 s: 8.8 s in all.
            try:
                peer.sendall(bytes([byte]))
                assert peer.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert time.monotonic() - started < 3.0


def test_many_who_say_nothing_keep_nobody_out(victim: Victim) -> None:
    limit = tcp_server._MAX_STRANGERS
    silent = [victim.connect()[0] for _ in range(limit + 40)]
    wait_until(lambda: victim.threads <= limit)
    assert silent[0].recv(1) == b""  # Who has waited longest goes first.
    key = _KEY + 9
    victim.engine.publish(key, [_DATA], 60.0)
    started = time.monotonic()
    np.testing.assert_array_equal(victim.pulls(key), _DATA)
    assert time.monotonic() - started < 2.0
    victim.engine.release(key, delivered=True)
    for peer in silent:
        peer.close()
    wait_until(lambda: victim.threads <= 2)  # Those of the pull may stay.


def test_who_has_proved_an_id_may_stay(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "_STRANGER_SECONDS", 0.3)
    key = _KEY + 11
    victim.engine.publish(key, [_DATA], 60.0)
    victim.pulls(key)
    assert victim.engine._server is not None
    (connection,) = victim.engine._server._connections
    silent = [victim.connect()[0] for _ in range(tcp_server._MAX_STRANGERS + 1)]
    wait_until(lambda: victim.threads == 1, 5.0)  # The strangers' time is over.
    assert victim.engine._server._connections == {connection}
    with pytest.raises(TransferError, match="ids are for one use"):
        victim.pulls(key)  # Over the same connection.
    assert victim.engine._server._connections == {connection}
    for peer in silent:
        peer.close()
    victim.engine.release(key, delivered=True)


def test_a_failing_accept_does_not_end_the_engine(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert victim.engine._server is not None
    listener = victim.engine._server._listener
    failed = threading.Event()

    class Failing:
        """A listener without file descriptors, once."""

        def __getattr__(self, name: str) -> object:
            return getattr(listener, name)

        def accept(self) -> object:
            if not failed.is_set():
                failed.set()
                raise OSError(24, "Too many open files")
            return listener.accept()

    monkeypatch.setattr(victim.engine._server, "_listener", Failing())
    victim.connect()[0].close()  # The accept that is under way ends.
    assert failed.wait(5.0)


def test_a_grant_is_bounded_before_it_is_read() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(frames.FrameError, match="grant of 4294967295 bytes"):
            read_grant(right, lambda received: None)
