# SPDX-License-Identifier: Apache-2.0
"""What is particular to the shm engine; engines_test.py has what it shares with the others."""

import contextlib
import errno
import gc
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kvferry.control.engines import shm_link
from kvferry.control.engines.base import EngineOptions, EngineStartError, TransferError
from kvferry.control.engines.frames import NONCE_BYTES, prove, tag_of
from kvferry.control.engines.publications import fingerprint
from kvferry.control.engines.shm_engine import ShmEngine
from kvferry.control.engines.shm_link import Ask, Challenge, Forget, Free, Grant, Packet
from kvferry.control.engines.shm_segments import Segment
from kvferry.tests.control.engine_ends import IDS, Ends, random_array, same_bytes, specs_of
from kvferry.tests.control.engine_process import engine_process
from kvferry.tests.control.pairs import wait_until

ARRAYS = [jnp.arange(3.0)]
SPECS = specs_of(ARRAYS)


@pytest.fixture(name="ends")
def _ends() -> Iterator[Ends]:
    ends = Ends("shm")
    yield ends
    ends.close()


def lent(ends: Ends) -> int:
    gc.collect()  # JAX lets go of what it was given outside of Python here.
    return ends.source.counters()["segments_lent"]


class Stranger:
    """Speaks the packets of the engine, but says what it wants."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(5.0)

    def say(self, packet: Packet, fd: int = -1) -> None:
        data = msgspec.msgpack.encode(packet)
        socket.send_fds(self._connection, [data], [fd] if fd >= 0 else [])

    def hear(self) -> Any:
        """Returns the next packet, or None at the end of the connection."""
        data = self._connection.recv(1 << 16)
        return msgspec.msgpack.decode(data, type=Packet) if data else None

    def ask(self, key: int, challenge: bytes, *, tag: bytes | None = None) -> None:
        nonce = bytes(NONCE_BYTES)
        proof = prove(key, challenge, nonce, 0, 1)
        self.say(Ask(1, tag or tag_of(key), proof, nonce, fingerprint(SPECS)))


Caller: TypeAlias = Callable[[], tuple[Stranger, bytes]]


@pytest.fixture(name="call")
def _call(ends: Ends) -> Iterator[Caller]:
    """Returns a stranger on a new connection to the source, and its challenge."""
    with contextlib.ExitStack() as stack:

        def call() -> tuple[Stranger, bytes]:
            stranger = Stranger(stack.enter_context(ends.connect()))
            return stranger, stranger.hear().challenge

        yield call


@contextlib.contextmanager
def publisher() -> Iterator[tuple[socket.socket, str]]:
    """Listens like an engine that publishes."""
    listener, address = shm_link.listen()
    listener.settimeout(5.0)
    with listener:
        yield listener, address


def test_arrays_are_the_shared_memory_without_a_copy(ends: Ends) -> None:
    arrays = [random_array((1000, 3), "bfloat16", seed) for seed in range(3)]
    pulled = ends.move(arrays)
    (segment,) = ends.source._pool._segments.values()  # type: ignore[attr-defined]
    start = pulled[0].unsafe_buffer_pointer()
    assert [each.unsafe_buffer_pointer() - start for each in pulled] == [0, 6016, 12032]
    assert segment.memory is not None
    segment.memory[:2] = np.array([1.5], jnp.bfloat16).view(np.uint8)
    assert np.asarray(pulled[0])[0, 0] == 1.5  # Which nobody but this test does.


def test_a_segment_is_written_again_only_after_the_last_reader(ends: Ends) -> None:
    first, second = random_array((999,), "uint16", 1), random_array((999,), "uint16", 2)
    (held,) = ends.move([first])
    view = np.asarray(held)[5:]
    same_bytes(ends.move([second])[0], second)
    assert ends.source.counters()["segments"] == 2
    del held
    assert lent(ends) >= 1
    np.testing.assert_array_equal(view, np.asarray(first)[5:])
    del view
    wait_until(lambda: lent(ends) == 0)
    for _ in range(5):
        same_bytes(ends.move([second])[0], second)
        wait_until(lambda: lent(ends) == 0)
    assert ends.source.counters()["segments"] == 2


def test_a_computation_reads_on_after_its_arrays_are_gone(ends: Ends) -> None:
    @jax.jit
    def slow(weights: jax.Array, pages: jax.Array) -> jax.Array:
        for _ in range(20):
            weights = weights @ weights / 300.0
        # Read at the end, when Python has let go of them for long.
        return pages + (weights.sum() > 1e30).astype(pages.dtype)

    array, others = random_array((999,), "uint16", 1), random_array((999,), "uint16", 2)
    weights = jnp.ones((300, 300))
    jax.block_until_ready(slow(weights, array))
    results = []
    for _ in range(10):
        results.append(slow(weights, *ends.move([array])))
        for _ in range(3):
            ends.move([others])
    for result in results:
        same_bytes(result, array)


@pytest.mark.parametrize("end", ["source", "target", "connection"])
def test_arrays_outlive_what_brought_them(ends: Ends, end: str) -> None:
    array = random_array((999,), "uint16")
    (held,) = ends.move([array])
    if end == "connection":
        ends.target.disconnect(ends.address)
        # The source cannot know any more when the arrays go: it gives the segment up.
        wait_until(lambda: ends.source.counters()["segments"] == 0)
        ends.move([random_array((999,), "uint16", 5)])
    else:
        getattr(ends, end).close()
    same_bytes(held, array)


def test_another_process_returns_what_it_was_lent(ends: Ends) -> None:
    what: dict[str, Any] = {"shape": [999], "dtype": "uint16", "count": 2}
    with engine_process("shm") as peer:
        for number in range(3):
            key = IDS.next_id()
            arrays = [random_array((999,), "uint16", seed) for seed in range(2)]
            ends.source.publish(key, arrays, 30.0)
            assert peer("pull", address=ends.address, key=key, **what)
            ends.source.release(key, delivered=True)
            wait_until(lambda: lent(ends) == 1)
            if number == 2:
                peer.kill()  # It cannot return it any more: the segment is gone for good.
                wait_until(lambda: ends.source.counters()["segments"] == 0)
                break
            peer("drop", key=key)
            wait_until(lambda: lent(ends) == 0)
            assert ends.source.counters()["segments"] == 1


def test_device_memory_is_free_once_it_is_staged(ends: Ends) -> None:
    key, array = IDS.next_id(), random_array((999,), "uint16")
    gone = weakref.ref(array)
    ends.source.publish(key, [array], 30.0)
    del array
    wait_until(lambda: gone() is None)
    pull = ends.pull(key, [jax.ShapeDtypeStruct((999,), jnp.uint16)])
    assert pull.wait(5.0)
    same_bytes(pull.result()[0], random_array((999,), "uint16"))
    ends.source.release(key, delivered=True)


def test_shared_memory_is_bounded() -> None:
    engine = ShmEngine(EngineOptions(), capacity_bytes=1 << 20)
    address = engine.start()
    half, keys = [jnp.zeros((1 << 19,), jnp.uint8)], [IDS.next_id() for _ in range(3)]
    for key in keys[:2]:
        assert engine.has_room(specs_of(half))
        engine.publish(key, half, 30.0)
    assert not engine.has_room(specs_of(half))
    with pytest.raises(TransferError, match="524288 bytes more than the shared memory"):
        engine.publish(keys[2], half, 30.0)
    engine.release(keys[0], delivered=False)
    assert engine.has_room(specs_of(half)), "whoever waits for a release asks only once"
    engine.publish(keys[2], half, 30.0)
    pull = engine.pull(address, keys[2], specs_of(half), 5.0)
    assert pull.wait(5.0) and pull.result()
    assert engine.counters()["segment_bytes"] <= 3 << 19
    engine.close()
    assert engine.counters()["segments"] == 0


def test_what_cannot_be_staged_is_told_to_the_puller(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.control.engines.shm_segments._available_bytes", lambda: 5)
    key = IDS.next_id()
    ends.source.publish(key, ARRAYS, 30.0)
    assert "no memory to stage in" in ends.refused(key, SPECS)
    ends.source.release(key, delivered=False)
    monkeypatch.undo()
    same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])


def test_given_up_pulls_return_what_was_lent(ends: Ends) -> None:
    for _ in range(20):
        key = IDS.next_id()
        ends.source.publish(key, ARRAYS, 30.0)
        pull = ends.pull(key, SPECS)
        pull.cancel()
        del pull
        ends.source.release(key, delivered=False)
    wait_until(lambda: lent(ends) == 0)
    assert ends.source.counters()["segments"] <= 20


def test_without_the_id_there_is_no_memory(ends: Ends, call: Caller) -> None:
    key = IDS.next_id()
    ends.source.publish(key, ARRAYS, 30.0)
    honest, challenge = call()
    replaying, _ = call()
    replaying.ask(key, challenge)  # Right id, another connection's challenge.
    assert replaying.hear() is None
    guessing, own = call()
    guessing.ask(key ^ 1, own, tag=tag_of(key))
    assert guessing.hear() is None
    honest.ask(key, challenge)
    assert honest.hear() == Grant(1, "", 0, 0)
    ends.source.release(key, delivered=True)


@pytest.mark.parametrize("packet", [Challenge(b"x" * 16), Grant(0), Forget(0)])
def test_a_puller_that_says_what_only_publishers_say(
    ends: Ends, call: Caller, packet: Packet
) -> None:
    stranger, _ = call()
    stranger.say(packet, 0)
    assert stranger.hear() is None
    same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])


def test_leases_are_returned_once_and_only_by_who_has_them(ends: Ends, call: Caller) -> None:
    (held,) = ends.move(ARRAYS)
    stranger, challenge = call()
    for lease in (0, 1, 2**40, -1):
        stranger.say(Free(lease))
    key = IDS.next_id()
    stranger.ask(key, challenge)
    assert "nothing is published" in stranger.hear().error  # All before it was read.
    assert lent(ends) == 1
    del held
    wait_until(lambda: lent(ends) == 0)


def test_a_puller_that_does_not_read_is_dropped(
    ends: Ends, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_link, "_MAX_WAITING", 50)
    stranger, challenge = call()
    with pytest.raises(OSError):
        for _ in range(100_000):
            stranger.ask(IDS.next_id(), challenge)
    wait_until(lambda: not ends.source._source.borrowers)  # type: ignore[attr-defined]
    same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])


def _unsealed() -> int:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    return fd


def _short() -> int:
    segment = Segment(0, 8)
    segment.open()
    return os.dup(segment.fd)


@pytest.mark.parametrize(
    ("packets", "make_fd", "problem"),
    [
        ([Grant(0, "", 0, 0)], _unsealed, "not sealed"),
        ([Grant(0, "", 0, 0)], _short, "8 of 64 bytes"),
        ([Grant(0, "", 0, 7)], None, "has not sent"),
        ([Challenge(b"y" * 16)], None, "unexpected packet Challenge"),
        ([Free(0)], None, "unexpected packet Free"),
        ([Forget(5), Grant(9, "", 3, 3), Grant(0, "no more")], None, "no more"),
    ],
)
def test_a_publisher_that_is_up_to_something(
    ends: Ends, packets: Sequence[Packet], make_fd: Any, problem: str
) -> None:
    with publisher() as (listener, address):
        pull = ends.target.pull(address, 5, SPECS, 5.0)
        connection, _ = listener.accept()
        with connection:
            stranger = Stranger(connection)
            stranger.say(Challenge(b"x" * 16))
            assert isinstance(stranger.hear(), Ask)
            for packet in packets:
                stranger.say(packet, make_fd() if make_fd else -1)
            assert pull.wait(5.0)
            with pytest.raises(TransferError, match=problem):
                pull.result()
    same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])


@pytest.mark.parametrize("challenge", [b"", b"short"])
def test_a_publisher_with_a_bad_challenge(ends: Ends, challenge: bytes) -> None:
    with publisher() as (listener, address):
        pull = ends.target.pull(address, 5, SPECS, 5.0)
        connection, _ = listener.accept()
        with connection:
            Stranger(connection).say(Challenge(challenge))
            assert pull.wait(5.0)
            with pytest.raises(TransferError, match="a challenge of"):
                pull.result()


def test_only_the_same_user(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert f"is of user {real}, not {real + 1}" in ends.refused(IDS.next_id(), SPECS)
    monkeypatch.undo()
    same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])


def test_it_says_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError("not in this sandbox")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(EngineStartError, match="not in this sandbox"):
            ShmEngine(EngineOptions()).start()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(EngineStartError, match="Linux only; use --transfer_engine=tcp"):
            ShmEngine(EngineOptions()).start()


def test_without_a_descriptor_to_share_a_pull_fails_and_the_next_one_works(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", refuse)
        key = IDS.next_id()
        ends.source.publish(key, ARRAYS, 30.0)
        pull = ends.pull(key, SPECS)
        assert pull.wait(5.0)
        with pytest.raises(TransferError):
            pull.result()
        ends.source.release(key, delivered=False)
    assert ends.source.failure is None
    ends.move(ARRAYS)


def test_without_a_descriptor_for_a_connection_the_engine_waits_for_one(ends: Ends) -> None:
    class Listener:
        """Has no descriptor left the first two times."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener
            self.refused: list[float] = []
            self.fileno = listener.fileno
            self.close = listener.close

        def accept(self) -> Any:
            if len(self.refused) < 2:
                self.refused.append(time.monotonic())
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self._listener.accept()

    assert isinstance(ends.source, ShmEngine)
    peers: Any = ends.source._source
    listener = peers._listener = Listener(peers._listener)
    ends.move(ARRAYS)
    first, second = listener.refused
    assert second - first > 0.05  # It did not spin.
    assert ends.source.failure is None
