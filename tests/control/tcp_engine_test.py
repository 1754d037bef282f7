# SPDX-License-Identifier: Apache-2.0
"""What is particular to the tcp engine; engines_test.py has what it shares with the others."""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from kvferry.control.engines import frames, tcp_pull, tcp_server
from kvferry.control.engines.base import EngineOptions, EngineStartError, TransferError
from kvferry.control.engines.frames import (
    CHALLENGE_BYTES,
    NONCE_BYTES,
    Grant,
    offsets,
    pack_grant,
    pack_request,
    read_grant,
    stream_parts,
    tag_of,
)
from kvferry.control.engines.tcp_engine import TcpEngine
from kvferry.control.engines.tcp_pull import TcpPull
from kvferry.control.ids import IdSource
from kvferry.control.security import PortInUseError
from kvferry.tests.control.pairs import wait_until

IDS = IdSource()
BIG = 64 << 20  # More than the kernel buffers of a connection hold.


@pytest.fixture(name="source")
def _source() -> Iterator[TcpEngine]:
    engine = TcpEngine(EngineOptions(channels=2))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(name="target")
def _target() -> Iterator[TcpEngine]:
    engine = TcpEngine(EngineOptions(channels=4))
    engine.start()
    yield engine
    engine.close()


def address(engine: TcpEngine) -> str:
    assert engine._server is not None
    return f"127.0.0.1:{engine._server._listener.getsockname()[1]}"


def specs(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def move(source: TcpEngine, target: TcpEngine, array: jax.Array) -> jax.Array:
    key = IDS.next_id()
    source.publish(key, [array], 30.0)
    pull = target.pull(address(source), key, specs(array), 20.0)
    assert pull.wait(21.0)
    (result,) = pull.result()
    source.release(key, delivered=True)
    return result


def fails(source: TcpEngine, target: TcpEngine, key: int, *wanted: jax.Array) -> str:
    pull = target.pull(address(source), key, specs(*wanted), 20.0)
    assert wait_until(lambda: pull.wait(0.01)) < 5.0
    with pytest.raises(TransferError) as caught:
        pull.result()
    return str(caught.value)


def _say(engine: TcpEngine) -> tuple[socket.socket, bytes]:
    peer = socket.create_connection(("127.0.0.1", int(address(engine).split(":")[1])))
    peer.settimeout(5.0)
    return peer, peer.recv(CHALLENGE_BYTES)


def _nothing(received: int) -> None:
    pass


def test_errors_travel_in_band(source: TcpEngine, target: TcpEngine) -> None:
    assert "nothing is published under this id" in fails(source, target, IDS.next_id(), jnp.ones(3))
    key = IDS.next_id()
    source.publish(key, [jnp.ones(3)], 30.0)
    assert "published [((3,), 'float32')].., asked for [((4,), 'float32')].." in fails(
        source, target, key, jnp.ones(4)
    )
    assert "ids are for one use" in fails(source, target, key, jnp.ones(3))
    source.release(key, delivered=False)
    assert "released" in fails(source, target, key, jnp.ones(3))
    assert np.asarray(move(source, target, jnp.ones(3))).tolist() == [1, 1, 1]


def test_failed_computations_travel_in_band(source: TcpEngine, target: TcpEngine) -> None:
    from jax.experimental import transfer

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    broken = transfer.make_error_array(
        jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding), "out of memory"
    )
    key = IDS.next_id()
    source.publish(key, [broken], 30.0)
    assert "out of memory" in fails(source, target, key, jnp.ones(3))
    source.release(key, delivered=False)


def test_without_the_id_there_is_no_data(source: TcpEngine) -> None:
    key = IDS.next_id()
    source.publish(key, [jnp.ones(3)], 30.0)
    nonce = bytes(NONCE_BYTES)
    # An honest request gets the data.
    peer, challenge = _say(source)
    with peer:
        # A replayed proof: right key, another connection's challenge.
        peer.sendall(pack_request(key, os.urandom(CHALLENGE_BYTES), nonce, 0, 1))
        assert peer.recv(1) == b""
    peer, challenge = _say(source)
    with peer:
        # The name on the wire alone proves nothing.
        wrong = bytearray(pack_request(key ^ 1, challenge, nonce, 0, 1))
        wrong[4:20] = tag_of(key)
        peer.sendall(wrong)
        assert peer.recv(1) == b""
    peer, challenge = _say(source)
    with peer:
        peer.sendall(pack_request(key, challenge, nonce, 0, 1))
        assert read_grant(peer, _nothing).leaves == [((3,), "float32")]
    source.release(key, delivered=True)


@pytest.mark.parametrize("data", [b"", b"\x00" * 4, b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(500)])
def test_rubbish_on_the_port_does_no_harm(
    source: TcpEngine, target: TcpEngine, data: bytes
) -> None:
    peer, _ = _say(source)
    with peer:
        peer.sendall(data)
    move(source, target, jnp.arange(10.0))
    assert source._server is not None
    wait_until(lambda: source._server is not None and not source._server._publications)


def test_a_stream_that_ends_elsewhere_is_noticed(
    source: TcpEngine, target: TcpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = frames.send_parts

    def shift(peer, head, arrays, index, count):  # type: ignore[no-untyped-def]
        real(peer, head + bytes(8), arrays, index, count)

    monkeypatch.setattr("kvferry.control.engines.tcp_server.send_parts", shift)
    key = IDS.next_id()
    array = jnp.arange(4096.0)
    source.publish(key, [array], 30.0)
    assert "no end mark" in fails(source, target, key, array)
    source.release(key, delivered=False)
    monkeypatch.setattr("kvferry.control.engines.tcp_server.send_parts", real)
    np.testing.assert_array_equal(move(source, target, array), array)


def test_a_puller_that_stops_to_read_blocks_nobody_else(
    source: TcpEngine, target: TcpEngine
) -> None:
    stuck, array = IDS.next_id(), jnp.ones(BIG // 4)
    source.publish(stuck, [array], 30.0)
    frozen = []
    for index in range(4):
        peer, challenge = _say(source)
        peer.sendall(pack_request(stuck, challenge, bytes(NONCE_BYTES), index, 4))
        frozen.append(peer)
    start = time.monotonic()
    np.testing.assert_array_equal(move(source, target, array), 1)
    assert time.monotonic() - start < 10.0
    source.release(stuck, delivered=False)  # Its connections are broken off.
    assert source._server is not None
    wait_until(lambda: source._server is not None and len(source._server._connections) <= 4)
    for peer in frozen:
        peer.close()


def test_release_breaks_a_transfer_off(source: TcpEngine, target: TcpEngine) -> None:
    key, array = IDS.next_id(), jnp.ones(4 * BIG // 4)
    source.publish(key, [array], 30.0)
    pull = target.pull(address(source), key, specs(array), 30.0)
    source.release(key, delivered=False)
    assert wait_until(lambda: pull.wait(0.01)) < 5.0
    with pytest.raises(TransferError):
        pull.result()
    wait_until(lambda: target.counters()["draining_pulls"] == 0)
    np.testing.assert_array_equal(move(source, target, jnp.ones(5)), 1)


def test_cancel_ends_its_streams(source: TcpEngine, target: TcpEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        pull = target.pull(
            f"127.0.0.1:{mute.getsockname()[1]}", IDS.next_id(), specs(jnp.ones(3)), 30.0
        )
        time.sleep(0.05)
        pull.cancel()
        assert pull.wait(0.0)
        wait_until(lambda: target.counters()["draining_pulls"] == 0, 2.0)
    np.testing.assert_array_equal(move(source, target, jnp.ones(5)), 1)


def test_publications_expire(source: TcpEngine, target: TcpEngine) -> None:
    key = IDS.next_id()
    source.publish(key, [jnp.ones(3)], 0.2)
    assert source.counters()["published_keys"] == 1
    wait_until(lambda: source.counters()["published_keys"] == 0, 3.0)
    assert "expired" in fails(source, target, key, jnp.ones(3))


def test_a_restarted_peer_is_reached_again(target: TcpEngine) -> None:
    first = TcpEngine(EngineOptions())
    port = int(first.start().split(":")[1])
    move(first, target, jnp.ones(3))
    assert target.counters()["connections"] > 0
    first.close()
    second = TcpEngine(EngineOptions(port=port))
    assert second.start() == f"127.0.0.1:{port}"
    move(second, target, jnp.ones(3))  # Over connections that the old one has closed.
    target.disconnect(f"127.0.0.1:{port}")
    assert target.counters()["connections"] == 0
    second.close()
    key = IDS.next_id()
    pull = target.pull(f"127.0.0.1:{port}", key, specs(jnp.ones(3)), 5.0)
    assert pull.wait(6.0)
    with pytest.raises(TransferError, match="refused"):
        pull.result()


def test_arrays_are_the_received_bytes_without_a_copy(source: TcpEngine, target: TcpEngine) -> None:
    key, array = IDS.next_id(), jnp.arange(100_003, dtype=jnp.uint16)
    source.publish(key, [array, array], 30.0)
    pull = target.pull(address(source), key, specs(array, array), 20.0)
    assert pull.wait(20.0)
    base = pull.memory.ctypes.data  # type: ignore[attr-defined]
    found = [result.unsafe_buffer_pointer() for result in pull.result()]
    assert found == [base, base + offsets([array.nbytes] * 2)[0][1]]
    source.release(key, delivered=True)


def test_arrays_are_made_early_only_if_they_are_the_memory_that_is_received_into(
    source: TcpEngine, target: TcpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, array = IDS.next_id(), jnp.arange(1000.0)
    source.publish(key, [array], 30.0)
    with monkeypatch.context() as patched:
        # As if JAX copied what is there at that time.
        copies = [jnp.zeros(1000)]
        patched.setattr(tcp_pull, "arrays_in", lambda memory, specs: copies)
        pull = target.pull(address(source), key, specs(array), 20.0)
    assert isinstance(pull, TcpPull) and not pull._early
    assert pull.wait(20.0)
    np.testing.assert_array_equal(pull.result()[0], array)
    source.release(key, delivered=True)


def test_arrays_over_several_devices_are_made_afterwards(
    source: TcpEngine, target: TcpEngine
) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    key, array = IDS.next_id(), jax.device_put(jnp.arange(1000.0), place)
    source.publish(key, [array], 30.0)
    wanted = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
    pull = target.pull(address(source), key, [wanted], 20.0)
    assert isinstance(pull, TcpPull) and not pull._early
    assert pull.wait(20.0)
    np.testing.assert_array_equal(pull.result()[0], array)
    source.release(key, delivered=True)


def reads_here(source: TcpEngine, target: TcpEngine, key: int, array: jax.Array) -> TcpPull:
    """Starts a pull that the waiting thread receives itself."""
    move(source, target, jnp.ones(3))  # Leaves a connection.
    # Its next challenge may still be on the way, and then a worker receives.
    pull = target.pull(address(source), key, specs(array), 20.0)
    assert isinstance(pull, TcpPull)
    return pull


def test_errors_reach_the_thread_that_reads(source: TcpEngine, target: TcpEngine) -> None:
    array = jnp.arange(100.0)
    for _ in range(20):
        pull = reads_here(source, target, IDS.next_id(), array)
        assert wait_until(lambda: pull.wait(0.01)) < 5.0  # noqa: B023 (called at once)
        with pytest.raises(TransferError, match="nothing is published under this id"):
            pull.result()
    wait_until(lambda: target.counters()["draining_pulls"] == 0)
    assert target.counters()["connections"] <= 2


def test_a_connection_that_was_closed_meanwhile_is_replaced(target: TcpEngine) -> None:
    for _ in range(5):
        first = TcpEngine(EngineOptions())
        where = first.start()
        first.publish(1, [jnp.ones(3)], 30.0)
        assert target.pull(where, 1, specs(jnp.ones(3)), 20.0).wait(20.0)
        first.close()
        second = TcpEngine(EngineOptions(port=int(where.split(":")[1])))
        second.start()
        second.publish(2, [jnp.full(3, 2.0)], 30.0)
        pull = target.pull(where, 2, specs(jnp.ones(3)), 20.0)
        assert wait_until(lambda: pull.wait(0.01)) < 5.0  # noqa: B023 (called at once)
        np.testing.assert_array_equal(pull.result()[0], 2.0)
        second.close()


@pytest.mark.parametrize("how", ["cancel", "close", "deadline", "the peer closes"])
def test_whoever_reads_is_woken(target: TcpEngine, how: str) -> None:
    wanted = specs(jnp.ones(3))
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        first = target.pull(where, 1, wanted, 20.0)
        peer, _ = server.accept()
        with peer:
            peer.sendall(bytes(CHALLENGE_BYTES))
            peer.recv(1000)
            # Says no, and is ready for another request, which it never answers.
            peer.sendall(pack_grant(Grant(error="no")) + bytes(CHALLENGE_BYTES))
            assert first.wait(5.0)
            wait_until(lambda: target.counters()["connections"] == 1)
            pull = target.pull(where, 2, wanted, 0.3 if how == "deadline" else 20.0)
            assert isinstance(pull, TcpPull) and pull._here is not None
            assert not pull.wait(0.0)
            waiter = threading.Thread(target=pull.wait, args=(20.0,))
            waiter.start()
            if how == "cancel":
                pull.cancel()
            elif how == "close":
                target.close()
            elif how == "the peer closes":
                server.close()
                peer.close()
            waiter.join(5.0)
            assert not waiter.is_alive()
            with pytest.raises(TransferError):
                pull.result()
            assert pull._here is None
    wait_until(lambda: target.counters()["draining_pulls"] == 0)
    assert target.counters()["connections"] == 0


def test_start_errors(source: TcpEngine) -> None:
    port = int(address(source).split(":")[1])
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is taken"):
        TcpEngine(EngineOptions(port=port)).start()
    for host in ("0.0.0.0", "localhost", "192.0.2.1"):
        with pytest.raises(EngineStartError, match=host):
            TcpEngine(EngineOptions(host=host)).start()
    idle = TcpEngine(EngineOptions())
    with pytest.raises(TransferError, match="not running"):
        idle.publish(1, [jnp.ones(3)], 1.0)
    with pytest.raises(TransferError, match="not running"):
        idle.pull("127.0.0.1:1", 1, [], 1.0)
    idle.close()


def test_ipv6() -> None:
    engine = TcpEngine(EngineOptions(host="::1"))
    where = engine.start()
    assert where.startswith("[::1]:")
    engine.publish(5, [jnp.ones(3)], 10.0)
    pull = engine.pull(where, 5, specs(jnp.ones(3)), 5.0)
    assert pull.wait(6.0) and pull.result()
    engine.close()


def test_threads_end_with_the_engine() -> None:
    before = set(threading.enumerate())
    engine = TcpEngine(EngineOptions())
    where = engine.start()
    engine.publish(5, [jnp.ones(3)], 10.0)
    assert engine.pull(where, 5, specs(jnp.ones(3)), 5.0).wait(6.0)
    engine.close()
    engine.close()
    wait_until(lambda: not set(threading.enumerate()) - before)


_SIZES = strategies.lists(strategies.integers(0, 1000), max_size=12)


@hypothesis.given(_SIZES, strategies.integers(1, 9))
def test_streams_carry_every_byte_once(sizes: list[int], count: int) -> None:
    seen = [np.zeros(size, np.int64) for size in sizes]
    for index in range(count):
        for leaf, begin, end in stream_parts(sizes, index, count):
            seen[leaf][begin:end] += 1
    assert all((each == 1).all() for each in seen)
    starts, total = offsets(sizes)
    assert all(start % 64 == 0 for start in [*starts, total])


@hypothesis.given(_SIZES, strategies.integers(1, 9))
def test_what_is_sent_is_what_is_received(sizes: list[int], count: int) -> None:
    rng = np.random.default_rng(len(sizes))
    arrays = [rng.integers(1, 256, size, np.uint8) for size in sizes]
    starts, total = offsets(sizes)
    memory = np.zeros(total, np.uint8)
    for index in range(count):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frames.send_parts(ours, b"head", arrays, index, count)
            assert theirs.recv(4) == b"head"
            frames.receive_part(theirs, memory, index, count, lambda received: None)
    for array, start in zip(arrays, starts, strict=True):
        np.testing.assert_array_equal(memory[start : start + array.size], array)


def test_partly_sent_pieces_are_sent_on() -> None:
    """As happens when the kernel's buffer is full and the time limit of a send passes."""
    views = [memoryview(bytes([n] * n)) for n in (1, 0, 5, 7, 200, 3)] * 300
    sent = bytearray()

    class Slow:
        def sendmsg(self, pieces: list[memoryview]) -> int:
            sent.extend(b"".join(pieces)[:9])
            return min(9, sum(map(len, pieces)))

    frames.send_views(Slow(), views)  # type: ignore[arg-type]
    assert bytes(sent) == b"".join(views)


def test_a_thread_that_has_died_makes_the_process_unhealthy(
    source: TcpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source._server is not None and source.failure is None
    monkeypatch.setattr(source._server, "release", None)
    source.publish(IDS.next_id(), [jnp.arange(3.0)], 0.1)  # To be released when it expires.
    wait_until(lambda: source.failure)
    assert source.failure is not None
    assert source.failure.startswith("thread kv-tcp-expire has ended: TypeError")


def test_too_many_threads_are_a_passing_problem(
    source: TcpEngine, target: TcpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def __init__(self, *args: object) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(tcp_server, "GuardedThread", Refused)
        where = ("127.0.0.1", int(address(source).split(":")[1]))
        with socket.create_connection(where, timeout=5.0) as peer:
            assert peer.recv(1) == b""
    np.testing.assert_array_equal(move(source, target, jnp.arange(3.0)), [0, 1, 2])
    assert source.failure is None


def test_a_pull_for_which_there_is_no_memory_is_refused(
    source: TcpEngine, target: TcpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lend(num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    key, array = IDS.next_id(), jnp.arange(3.0)
    move(source, target, array)  # Leaves a connection, over which the next pull asks early.
    source.publish(key, [array], 30.0)
    with monkeypatch.context() as patched:
        patched.setattr(target._buffers, "lend", lend)
        with pytest.raises(TransferError, match="no memory for 64 bytes: .*Cannot allocate"):
            target.pull(address(source), key, specs(array), 20.0)
    source.release(key, delivered=False)
    np.testing.assert_array_equal(move(source, target, array), array)
