# SPDX-License-Identifier: Apache-2.0
"""What the auto engine chooses, and that both ends get along with it."""

import logging
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from kvferry.control.engines import shm_link
from kvferry.control.engines.auto_engine import AutoEngine
from kvferry.control.engines.base import EngineOptions, EngineStartError, TransferError
from kvferry.control.engines.shm_engine import ShmEngine
from kvferry.control.security import PortInUseError
from kvferry.tests.control.engine_ends import IDS, Ends, random_array, same_bytes, specs_of
from kvferry.tests.control.pairs import pair, wait_until

ARRAYS = [jnp.arange(3.0)]


@pytest.fixture(name="ends")
def _ends() -> Iterator[Ends]:
    ends = Ends("auto")
    yield ends
    ends.close()


def test_one_host_means_shared_memory(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "absl"):
        for _ in range(3):
            same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])
            assert ends.target.counters()["shm_connections"] == 1
            ends.target.disconnect(ends.address)
    assert ends.source.counters()["tcp_connections"] == 0
    told = [record.getMessage() for record in caplog.records if "travel by" in record.getMessage()]
    assert told == [f"pages from {ends.address} travel by shm: it is on this host"]


def test_another_host_means_the_network(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    listener, gone = shm_link.listen()
    listener.close()
    ends.address = ",".join(
        f"shm={gone}" if part.startswith("shm=") else part for part in ends.address.split(",")
    )
    with caplog.at_level(logging.INFO, "absl"):
        for _ in range(2):
            same_bytes(ends.move(ARRAYS)[0], ARRAYS[0])
    told = [record.getMessage() for record in caplog.records if "travel by" in record.getMessage()]
    assert len(told) == 1 and "travel by tcp: it is not on this host" in told[0]
    # Offered, but neither copied nor kept there.
    wait_until(lambda: ends.source.counters()["published_keys"] == 0)
    assert ends.target.counters()["tcp_connections"] == 1


def test_a_process_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ShmEngine) -> str:
        raise EngineStartError("not here")

    with monkeypatch.context() as patch:
        patch.setattr(ShmEngine, "start", refuse)
        without = AutoEngine(EngineOptions())
        address = without.start()
    assert address.startswith("tcp=127.0.0.1:")
    ends = Ends("auto")
    ends.move(ARRAYS)
    for source, target, where in (
        (without, ends.target, address),
        (ends.source, without, ends.address),
    ):
        key = IDS.next_id()
        source.publish(key, ARRAYS, 30.0)
        pull = target.pull(where, key, specs_of(ARRAYS), 5.0)
        assert pull.wait(5.0)
        same_bytes(pull.result()[0], ARRAYS[0])
        source.release(key, delivered=True)
        assert source.counters()["published_keys"] == 0
    ends.close()
    without.close()


def test_an_offer_that_nobody_takes_is_not_copied(ends: Ends) -> None:
    key = IDS.next_id()
    ends.source.publish(key, [random_array((1 << 20,), "uint8")], 30.0)
    shm = ends.source._shm  # type: ignore[attr-defined]
    (segment,) = [each for each in shm._pool._segments.values() if each.published]
    assert segment.memory is None
    ends.source.release(key, delivered=False)
    wait_until(lambda: not segment.published)


def test_a_refused_publication_leaves_no_offer(ends: Ends) -> None:
    key = IDS.next_id()
    ends.source._shm.publish(key, ARRAYS, 30.0)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="is published already"):
        ends.source.publish(key, ARRAYS, 30.0)
    assert ends.source.counters()["tcp_published_keys"] == 0
    ends.source.release(key, delivered=False)


def test_the_network_engine_must_fit() -> None:
    engine = AutoEngine(EngineOptions())
    assert engine.settings() == {"network": "tcp"}
    assert engine.exposure and "tcp" not in engine.versions()


@pytest.mark.parametrize("address", ["127.0.0.1:5", "", "tcp", "tcp=", "shm=x,nonsense"])
def test_an_address_of_another_engine_is_named(ends: Ends, address: str) -> None:
    with pytest.raises(TransferError, match="is not an address of transfer engine 'auto'"):
        ends.target.pull(address, 5, specs_of(ARRAYS), 1.0)
    with pytest.raises(TransferError, match="does not offer transfer engine 'tcp'"):
        ends.target.pull("jax=127.0.0.1:5", 5, specs_of(ARRAYS), 1.0)


def test_a_taken_port_ends_the_start(ends: Ends) -> None:
    port = int(ends.address.split("tcp=")[1].split(",")[0].rpartition(":")[2])
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is taken"):
        AutoEngine(EngineOptions(port=port)).start()


@pytest.mark.parametrize("engine", ["auto", "shm", "zmq", "tcp"])
def test_a_pair_of_managers_with_each_engine(engine: str) -> None:
    with pair(engine) as both:
        for _ in range(3):
            both.transfer(7)
        wait_until(both.at_baseline)


def test_two_different_engines_are_told_apart() -> None:
    options = EngineOptions(channels=2)
    with pair(engines=(AutoEngine(options), ShmEngine(options))) as both:
        _, receiver = both.open(3)
        wait_until(lambda: receiver.failure is not None)
        assert receiver.failure is not None
        assert "transfer engine" in receiver.failure.reason
        assert "auto" in receiver.failure.reason and "shm" in receiver.failure.reason
