# SPDX-License-Identifier: Apache-2.0
"""What is particular to the zmq engine; engines_test.py has what it shares with the others."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import msgspec
import pytest
import zmq

from kvferry.control.engines import zmq_peers
from kvferry.control.engines.base import EngineOptions, EngineStartError, TransferError
from kvferry.control.engines.publications import fingerprint
from kvferry.control.engines.zmq_engine import ZmqEngine
from kvferry.control.security import CurveKeys, PortInUseError
from kvferry.tests.control.engine_ends import IDS, Ends, random_array, same_bytes, specs_of
from kvferry.tests.control.pairs import wait_until

ARRAYS = [jnp.arange(3.0)]
SPECS = specs_of(ARRAYS)


@pytest.fixture(name="ends")
def _ends() -> Iterator[Ends]:
    ends = Ends("zmq")
    yield ends
    ends.close()


class Stranger:
    """Asks like the engine, but what it wants."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://{address}")

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def ask(self, piece: int, key: int, *, pull: int = 0) -> None:
        request = ("kvz1", pull, piece, key, fingerprint(SPECS))
        self.send(msgspec.msgpack.encode(request))

    def hear(self, seconds: float = 5.0) -> list[Any]:
        """Returns the head of a piece and the sizes of the frames after it, or nothing."""
        if not self._socket.poll(int(seconds * 1000)):
            return []
        head, *frames = self._socket.recv_multipart()
        return [*msgspec.msgpack.decode(head)[1:], *map(len, frames)]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(name="stranger")
def _stranger(ends: Ends) -> Iterator[Stranger]:
    stranger = Stranger(ends.address)
    yield stranger
    stranger.close()


@contextlib.contextmanager
def engines(*options: EngineOptions) -> Iterator[list[tuple[ZmqEngine, str]]]:
    made = [ZmqEngine(each) for each in options]
    try:
        yield [(each, each.start()) for each in made]
    finally:
        for each in made:
            each.close()


def pull(target: ZmqEngine, address: str, key: int, seconds: float = 3.0) -> str:
    """Pulls `ARRAYS`; returns the error or an empty text."""
    made = target.pull(address, key, SPECS, seconds)
    assert made.wait(seconds + 1.0)
    try:
        same_bytes(made.result()[0], ARRAYS[0])
    except TransferError as error:
        return str(error)
    return ""


def test_arrays_travel_in_pieces(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_peers, "_PIECE_BYTES", 256)
    arrays = [random_array((size,), "uint8", size) for size in (1, 300, 64, 5000, 0, 63)]
    for left, right in zip(ends.move(arrays), arrays, strict=True):
        same_bytes(left, right)


def test_without_the_id_there_is_no_data(ends: Ends, stranger: Stranger) -> None:
    key = IDS.next_id()
    ends.source.publish(key, ARRAYS, 30.0)
    stranger.ask(0, key ^ 1)
    assert "nothing is published" in stranger.hear()[2]
    stranger.ask(0, key)
    assert stranger.hear() == [0, 0, "", 12]
    # Another pull of it, or another connection, gets nothing of it.
    stranger.ask(0, key, pull=1)
    assert "ids are for one use" in stranger.hear()[2]
    other = Stranger(ends.address)
    other.ask(1, key)
    assert "released" in other.hear()[2]
    other.close()
    ends.source.release(key, delivered=True)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x" * 100_000],
        [b"\x95"],
        [b"a", b"b"],
        [msgspec.msgpack.encode(("kvz1", -1, 0, 5, b""))],
        [msgspec.msgpack.encode(("kvz1", 0, 2**53, 5, b""))],
        [msgspec.msgpack.encode(("kvz2", 0, 0, 5, b""))],
    ],
)
def test_what_is_no_request_is_ignored(
    ends: Ends, stranger: Stranger, frames: Sequence[bytes]
) -> None:
    stranger.send(*frames)
    same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])
    assert stranger.hear(0.05) == []


def test_pieces_are_asked_for_in_order(ends: Ends, stranger: Stranger) -> None:
    key = IDS.next_id()
    ends.source.publish(key, ARRAYS, 30.0)
    stranger.ask(0, key)
    assert stranger.hear() == [0, 0, "", 12]
    for piece in (1, 2, 2**50):
        stranger.ask(piece, key)
    assert stranger.hear(0.1) == []
    ends.source.release(key, delivered=True)


def test_a_released_publication_is_forgotten(ends: Ends) -> None:
    serving = ends.source._source._serving  # type: ignore[attr-defined]
    key = IDS.next_id()
    ends.source.publish(key, ARRAYS, 30.0)
    made = ends.pull(key, SPECS)
    assert made.wait(5.0) and len(serving) == 1
    ends.source.release(key, delivered=True)
    wait_until(lambda: not serving)


def test_memory_comes_back_at_once_from_a_pull_that_nobody_looked_at(ends: Ends) -> None:
    buffers = ends.target._buffers  # type: ignore[attr-defined]
    key = IDS.next_id()
    ends.source.publish(key, ARRAYS, 30.0)
    gc.disable()
    try:
        assert ends.pull(key, SPECS).wait(5.0)
        assert wait_until(lambda: buffers.num_lent == 0) < 3.0  # Later the pool collects itself.
    finally:
        gc.enable()
    ends.source.release(key, delivered=True)


def test_pages_travel_under_keys() -> None:
    ours, theirs = (CurveKeys(public_key=p, secret_key=s) for p, s in _two_pairs())
    with engines(
        EngineOptions(keys=ours), EngineOptions(keys=ours), EngineOptions(keys=theirs),
        EngineOptions(),
    ) as ((source, address), (friend, _), (foe, _), (keyless, _)):  # fmt: skip
        key = IDS.next_id()
        source.publish(key, ARRAYS, 30.0)
        for stranger in (foe, keyless):
            assert pull(stranger, address, key, 1.0)
        assert pull(friend, address, key) == ""
        source.release(key, delivered=True)


def _two_pairs() -> list[tuple[bytes, bytes]]:
    return [zmq.curve_keypair() for _ in range(2)]


def test_start_errors() -> None:
    with pytest.raises(EngineStartError, match=r"refusing to listen on 192\.0\.2\.1.*CURVE keys"):
        ZmqEngine(EngineOptions(host="192.0.2.1")).start()
    (public, secret), _ = _two_pairs()
    keys = CurveKeys(public_key=public, secret_key=secret)
    with pytest.raises(EngineStartError, match=r"192\.0\.2\.1"):
        ZmqEngine(EngineOptions(host="192.0.2.1", keys=keys)).start()
    for host in ("0.0.0.0", "localhost"):
        with pytest.raises(EngineStartError, match=host):
            ZmqEngine(EngineOptions(host=host, keys=keys)).start()
    with engines(EngineOptions()) as ((_, address),):
        port = int(address.split(":")[1])
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is taken"):
            ZmqEngine(EngineOptions(port=port)).start()


def test_ipv6() -> None:
    with engines(EngineOptions(host="::1"), EngineOptions()) as ((source, address), (target, _)):
        assert address.startswith("[::1]:")
        source.publish(5, ARRAYS, 30.0)
        assert pull(target, address, 5) == ""


def test_a_restarted_peer_is_reached_again() -> None:
    with engines(EngineOptions()) as ((target, _),):
        port = 0
        for key in (5, 6):
            with engines(EngineOptions(port=port)) as ((source, address),):
                source.publish(key, ARRAYS, 30.0)
                assert pull(target, address, key) == ""
                port = int(address.split(":")[1])
            wait_until(lambda: target.counters()["connections"] == 0)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.1:9000", "refusing to connect to 192.0.2.1: without CURVE keys"),
        ("nowhere:9000", "nowhere"),
    ],
)
def test_addresses_that_are_not_connected_to(ends: Ends, address: str, reason: str) -> None:
    assert reason in ends.refused(IDS.next_id(), SPECS, address=address)
