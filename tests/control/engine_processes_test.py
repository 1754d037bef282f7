# SPDX-License-Identifier: Apache-2.0
"""Every engine that works between processes, between processes; and one of the two dies."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.base import EngineOptions, TransferEngine, TransferError
from kvferry.control.engines.registry import create_engine
from kvferry.tests.control.engine_ends import (
    DTYPES,
    ENGINES_BETWEEN_PROCESSES,
    IDS,
    random_array,
)
from kvferry.tests.control.engine_process import EngineProcess, engine_process
from kvferry.tests.control.pairs import fails, wait_until
from kvferry.tests.control.peer_process import peer_process
from kvferry.tests.control.two_process_test import Decode

WHAT: dict[str, Any] = {"shape": [64, 33], "dtype": "uint16", "count": 3}
SPECS = [jax.ShapeDtypeStruct((64, 33), jnp.uint16)] * 3


@pytest.fixture(name="engine", scope="module", params=ENGINES_BETWEEN_PROCESSES)
def _engine(request: pytest.FixtureRequest) -> Iterator[tuple[TransferEngine, str]]:
    engine = create_engine(request.param, EngineOptions(channels=2))
    yield engine, engine.start()
    engine.close()


def pull(engine: TransferEngine, peer: EngineProcess, key: int, seconds: float = 20.0) -> str:
    """Pulls `WHAT`; returns the error, or an empty text if it arrived as it was published."""
    try:
        pulled = engine.pull(peer.address, key, SPECS, seconds)
        assert pulled.wait(seconds + 1.0)
        for seed, array in enumerate(pulled.result()):
            np.testing.assert_array_equal(array, random_array((64, 33), "uint16", seed))
    except TransferError as error:
        return str(error)
    return ""


def test_each_dtype_is_exact(engine: tuple[TransferEngine, str]) -> None:
    with engine_process(engine[0].engine_name) as peer:
        for dtype in DTYPES:
            key, shape = IDS.next_id(), (64, 1001)
            peer("publish", key=key, shape=shape, dtype=dtype, count=3)
            pulled = engine[0].pull(
                peer.address, key, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))] * 3, 10.0
            )
            assert pulled.wait(11.0)
            for seed, array in enumerate(pulled.result()):
                expected = np.asarray(random_array(shape, dtype, seed))
                assert np.asarray(array).tobytes() == expected.tobytes(), dtype
            peer("release", key=key, delivered=True)
        wait_until(lambda: peer("counters")["published_keys"] == 0)


def test_the_publisher_is_killed(engine: tuple[TransferEngine, str]) -> None:
    engine_name, shared_before = engine[0].engine_name, set(os.listdir("/dev/shm"))
    with engine_process(engine_name) as peer:
        key, unpublished, late = (IDS.next_id() for _ in range(3))
        for each in (key, late):
            peer("publish", key=each, **WHAT)
        held = engine[0].pull(peer.address, key, SPECS, 20.0)
        assert held.wait(20.0)
        arrays = held.result()
        peer.freeze()  # So that it does not answer any more.
        waiting = engine[0].pull(peer.address, unpublished, SPECS, 20.0)
        assert not waiting.wait(0.1)
        peer.kill()
        killed = time.monotonic()
        wait_until(lambda: waiting.wait(0.01), 5.0)
        with pytest.raises(TransferError):
            waiting.result()
        assert pull(engine[0], peer, late, 3.0)
        assert time.monotonic() - killed < 5.0
        for seed, array in enumerate(arrays):
            np.testing.assert_array_equal(array, random_array((64, 33), "uint16", seed))
    with engine_process(engine_name) as successor:
        key = IDS.next_id()
        successor("publish", key=key, **WHAT)
        assert pull(engine[0], successor, key) == ""
    assert engine[0].failure is None
    assert set(os.listdir("/dev/shm")) <= shared_before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_puller_dies_or_stops(engine: tuple[TransferEngine, str], number: int) -> None:
    source, address = engine
    array = random_array((4 << 20,), "float32")
    big: dict[str, Any] = {"shape": array.shape, "dtype": "float32", "count": 1}
    with engine_process(source.engine_name) as peer:
        keys = [IDS.next_id() for _ in range(3)]
        for key in keys:
            source.publish(key, [array], 30.0)
        assert peer("pull", address=address, key=keys[0], **big)
        for key in keys[1:]:
            peer("start_pull", address=address, key=key, **big)
        peer.process.send_signal(number)
        for key in keys:
            source.release(key, delivered=False)
        wait_until(lambda: source.counters()["published_keys"] == 0)
        with engine_process(source.engine_name) as other:
            key = IDS.next_id()
            source.publish(key, [array], 30.0)
            if (source.engine_name, number) != ("jax", signal.SIGSTOP):
                # One puller that stops to read blocks all others there.
                assert other("pull", address=address, key=key, **big)
            source.release(key, delivered=True)
        peer.kill()
    wait_until(lambda: source.counters()["published_keys"] == 0)
    assert source.failure is None
    wait_until(lambda: not source.counters().get("segments_lent", 0), what="segments are lost")


@pytest.mark.parametrize("name", [each for each in ENGINES_BETWEEN_PROCESSES if each != "jax"])
def test_prefill_and_decode(name: str) -> None:
    """With their managers; two_process_test.py has more of it for jax."""
    decode = Decode(engine=name)
    with peer_process(role="prefill", seed=1, engine=name) as peer:
        for _ in range(3):
            decode.transfer(peer, list(range(31)))
        for _ in range(10):
            decode.transfer(peer, [5, 3, 9])
        files, threads = peer.num_files(), peer("threads")
        for _ in range(30):
            decode.transfer(peer, [5, 3, 9])
        # A few segments more: JAX lets go of arrays a little later than Python.
        assert peer.num_files() <= files + 8 and peer("threads") == threads
        room, moving = decode.ready(peer, [10, 11])
        assert peer("send", room=room, pages=[0], last=False)
        peer.kill()
        assert "closed by the peer" in fails(moving, 2.0)
    with peer_process(role="prefill", seed=2, engine=name) as successor:
        decode.transfer(successor, [0, 1, 2])
    assert decode.manager.failure is None
    decode.manager.stop()
