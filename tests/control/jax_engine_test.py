# SPDX-License-Identifier: Apache-2.0
"""The traps of `jax.experimental.transfer` that the engine closes; engines_test.py has the rest."""

import functools
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from kvferry.control.engines import jax_watch
from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    TransferError,
    shard_plan,
)
from kvferry.control.engines.canary import self_test
from kvferry.control.engines.jax_engine import JaxEngine
from kvferry.control.engines.ports import claim_port
from kvferry.control.ids import IdSource
from kvferry.control.security import PortInUseError
from kvferry.tests.control.pairs import wait_until

IDS = IdSource()
SPEC = jax.ShapeDtypeStruct((1024,), jnp.float32)


@pytest.fixture(name="engine", scope="module")
def _engine() -> Iterator[JaxEngine]:
    engine = JaxEngine(EngineOptions(channels=2))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(name="address", scope="module")
def _address(engine: JaxEngine) -> str:
    return engine._address


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("host", ["localhost", "256.1.1.1", "0.0.0.0", "::", ""])
def test_names_and_wildcards_are_refused(host: str) -> None:
    """The library turns a name that it cannot resolve into a wildcard."""
    with pytest.raises(EngineStartError, match="cannot start"):
        JaxEngine(EngineOptions(host=host)).start()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(EngineStartError, match="192.0.2.1"):
        JaxEngine(EngineOptions(host="192.0.2.1", port=9100)).start()


def test_a_port_is_taken_once() -> None:
    """The library opens ports with SO_REUSEPORT: two servers would share the connections."""
    port = free_port()
    first = JaxEngine(EngineOptions(port=port, channels=1))
    assert first.start() == f"127.0.0.1:{port}"
    self_test(first, f"127.0.0.1:{port}", [])
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is taken"):
        JaxEngine(EngineOptions(port=port)).start()
    first.close()


def test_a_foreign_listener_with_reuseport_is_found() -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        with pytest.raises(PortInUseError):
            claim_port("127.0.0.1", foreign.getsockname()[1])


def test_a_claim_ends_with_its_owner() -> None:
    port = free_port()
    with claim_port("127.0.0.1", port):
        with pytest.raises(PortInUseError):  # Though nothing listens there yet.
            claim_port("127.0.0.1", port)
    claim_port("127.0.0.1", port).close()
    with claim_port("127.0.0.1", 0), claim_port("127.0.0.1", 0):
        pass
    with pytest.raises(OSError, match="cannot listen on 192.0.2.1:5"):
        claim_port("192.0.2.1", 5)


def test_ports_in_the_closing_state_are_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # This side closes first, so its port lingers in TIME_WAIT.
    claim_port("127.0.0.1", port).close()


def test_only_row_major_arrays_travel(engine: JaxEngine) -> None:
    """The library sends bytes as they lie in memory and ignores the layout."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = jax.device_put(jnp.ones((4, 8)), Format(Layout((1, 0)), sharding))
    with pytest.raises(ValueError, match="only row-major arrays can travel"):
        engine.publish(IDS.next_id(), [array], 10.0)


def test_a_late_pull_of_an_abort_ends_at_once(engine: JaxEngine, address: str) -> None:
    """Also with so many arrays that the library would let some of them hang."""
    key = IDS.next_id()
    engine.publish(key, [jnp.full((1024,), float(n)) for n in range(70)], 10.0)
    engine.release(key, delivered=False)
    pull = engine.pull(address, key, [SPEC] * 70, 10.0)
    assert wait_until(lambda: pull.wait(0.01)) < 2.0
    with pytest.raises(TransferError, match="released by the publisher"):
        pull.result()


def test_an_error_does_not_spoil_the_next_pull(engine: JaxEngine, address: str) -> None:
    for _ in range(5):
        key = IDS.next_id()
        engine.publish(key, [jnp.ones(1024)], 10.0)
        engine.release(key, delivered=False)
        failing = engine.pull(address, key, [SPEC], 5.0)
        assert failing.wait(6.0)
        with pytest.raises(TransferError):
            failing.result()
        key = IDS.next_id()
        engine.publish(key, [jnp.arange(1024.0)], 10.0)
        pull = engine.pull(address, key, [SPEC], 5.0)
        assert pull.wait(6.0)
        np.testing.assert_array_equal(pull.result()[0], np.arange(1024.0))
        engine.release(key, delivered=True)


def test_a_dead_port_is_refused_at_once(engine: JaxEngine) -> None:
    """The library would wait for it for ever."""
    port = free_port()
    with pytest.raises(TransferError, match=f"pull 1 from 127.0.0.1:{port}: .*refused"):
        engine.pull(f"127.0.0.1:{port}", 1, [SPEC], 5.0)
    assert engine.failure is None and engine.counters()["draining_pulls"] == 0


# More than the receive buffers that there are.
_GIVEN_UP = 24


@pytest.mark.parametrize("shape", [(16,), (1 << 20,)])
def test_a_peer_that_cannot_be_reached_makes_no_one_unhealthy(
    engine: JaxEngine, address: str, shape: tuple[int]
) -> None:
    """Its pulls hold no receive buffers, however many are given up."""
    before = engine.counters()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as mute:
        where = f"127.0.0.1:{mute.getsockname()[1]}"
        for number in range(_GIVEN_UP):
            pull = engine.pull(where, number, [jax.ShapeDtypeStruct(shape, jnp.float32)], 0.01)
            if number % 2:
                pull.cancel()
            assert wait_until(functools.partial(pull.wait, 0.01)) < 2.0
            with pytest.raises(TransferError):
                pull.result()
        # What is small was ended for good; of what is large, bytes might have been under way.
        assert engine.counters()["draining_pulls"] == (0 if shape == (16,) else _GIVEN_UP)
        watch = engine._watch
        wait_until(lambda: not watch._suspected and watch._probe is None)  # It has looked.
        assert engine.failure is None
        same(engine, address)
    # The library reports the end of a connection that never was one.
    wait_until(lambda: engine.counters() == before | {"connections": 1}, 10.0)
    wait_until(lambda: not watch.active)


def same(engine: JaxEngine, address: str) -> None:
    key = IDS.next_id()
    engine.publish(key, [jnp.arange(1024.0)], 10.0)
    pull = engine.pull(address, key, [SPEC], 5.0)
    assert pull.wait(6.0)
    np.testing.assert_array_equal(pull.result()[0], np.arange(1024.0))
    engine.release(key, delivered=True)


class FakeProbe:
    """Pulls of a process from itself that end when the test says so."""

    def __init__(self) -> None:
        self.ended = False
        self.made = 0
        self.watch = jax_watch.ReceiveWatch(self, lambda: None)

    def __call__(self) -> Any:
        self.made += 1
        return self

    def is_ready(self) -> bool:
        return self.ended

    def block_until_ready(self) -> None:
        assert self.ended

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.watch.tick()


def test_health_is_red_while_nothing_arrives_even_from_the_process_itself() -> None:
    probe = FakeProbe()
    probe.ticks(100)
    assert probe.made == 0 and not probe.watch.active
    probe.watch.suspect()
    probe.ticks(49)
    assert probe.watch.failure is None
    probe.watch.arrived()  # From a peer: slow, but not wedged.
    probe.ticks(49)
    assert probe.watch.failure is None
    probe.ticks(1)
    assert "nothing arrives any more" in str(probe.watch.failure)
    assert probe.made == 1
    probe.ended = True
    probe.ticks(1)
    assert probe.watch.failure is None and not probe.watch.active


def test_pulls_that_drain_are_a_reason_to_look_again_and_again() -> None:
    probe = FakeProbe()
    probe.ended = True
    waits = FakeProbe()
    probe.watch.drain([waits], None)  # type: ignore[list-item]
    probe.ticks(100)
    assert probe.made == 4 and probe.watch.num_draining == 1
    waits.ended = True
    assert probe.watch.num_draining == 0
    probe.ticks(100)
    assert probe.made == 4


def test_a_malformed_address_is_an_error(engine: JaxEngine) -> None:
    with pytest.raises(TransferError, match="nonsense"):
        engine.pull("nonsense", 1, [SPEC], 1.0)


def test_an_array_that_failed_to_compute_ends_the_pull(engine: JaxEngine, address: str) -> None:
    """An array that carries an error is "ready" like any other."""
    from jax.experimental import transfer

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    broken = transfer.make_error_array(
        jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=sharding), "out of memory"
    )
    key = IDS.next_id()
    engine.publish(key, [jnp.ones(1024), broken], 10.0)
    pull = engine.pull(address, key, [SPEC, SPEC], 5.0)
    assert pull.wait(6.0)
    with pytest.raises(TransferError, match="out of memory"):
        pull.result()
    engine.release(key, delivered=False)


def test_the_tick_thread_sleeps_while_there_is_nothing_to_expire() -> None:
    engine = JaxEngine(EngineOptions(channels=1))
    address = engine.start()
    assert not engine._expiring() and not engine._watch.active
    engine.publish(5, [jnp.ones(1024)], 0.2)
    assert engine._expiring()
    engine.pull(address, 5, [SPEC], 5.0).wait(6.0)
    engine.release(5, delivered=True)
    wait_until(lambda: not engine._expiring(), 5.0)
    engine.close()


def test_a_tick_thread_that_has_died_makes_the_process_unhealthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = JaxEngine(EngineOptions(channels=1))
    engine.start()
    assert engine.failure is None
    monkeypatch.setattr(engine._watch, "tick", None)
    engine.publish(5, [jnp.ones(1024)], 5.0)
    wait_until(lambda: engine.failure)
    assert engine.failure is not None
    assert engine.failure.startswith("thread kv-jax-tick has ended: TypeError")
    engine.close()


def test_a_publication_expires_by_itself(engine: JaxEngine, address: str) -> None:
    key = IDS.next_id()
    engine.publish(key, [jnp.ones(1024)], 0.1)
    time.sleep(2.5)  # The library counts in whole seconds.
    pull = engine.pull(address, key, [SPEC], 0.3)
    assert pull.wait(5.0)
    with pytest.raises(TransferError):
        pull.result()
    engine.release(key, delivered=False)


def test_a_closed_engine_refuses() -> None:
    engine = JaxEngine(EngineOptions(channels=1))
    with pytest.raises(TransferError, match="not running"):
        engine.publish(1, [jnp.ones(3)], 1.0)
    address = engine.start()
    engine.publish(1, [jnp.ones(3)], 1.0)
    engine.close()
    assert engine.counters()["published_keys"] == 0
    with pytest.raises(TransferError, match="not running"):
        engine.publish(2, [jnp.ones(3)], 1.0)
    with pytest.raises(TransferError, match="not running"):
        engine.pull(address, 2, [SPEC], 1.0)


def test_settings_and_versions() -> None:
    engine = JaxEngine(EngineOptions(channels=3, chunk_bytes=1 << 20))
    assert engine.settings() == {"channels": 3, "chunk_bytes": 1 << 20}
    assert engine.versions()["jax"] == jax.__version__


def test_shards_in_another_order_are_told_apart() -> None:
    """Pulled by position, they would exchange parts of the array without an error."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def plan(*parts: str | tuple[str, ...] | None) -> str:
        spec = jax.sharding.PartitionSpec(*parts)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return shard_plan([jax.ShapeDtypeStruct((4, 4), jnp.uint16, sharding=sharding)])

    plans = [plan("x", "y"), plan("y", "x"), plan("x", None), plan(None, "x"), plan(("x", "y"))]
    assert len(set(plans)) == len(plans)
    assert plan("x", "y") == "uint16[2, 2] at 0,0 0,2 2,0 2,2"
    assert shard_plan([SPEC, SPEC]) == "float32[1024] at whole"
