# SPDX-License-Identifier: Apache-2.0
"""Every engine and a whole hand-over on the loopback address of IPv6, and on nothing else."""

import socket

import jax
import psutil
import pytest

from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.canary import self_test
from kvferry.control.engines.registry import create_engine
from kvferry.tests.control.engine_ends import (
    ENGINES_BETWEEN_PROCESSES,
    IDS,
    random_array,
    same_bytes,
    specs_of,
)
from kvferry.tests.control.pairs import pair, wait_until

HOST = "::1"


def _why_not() -> str:
    try:
        with socket.create_server((HOST, 0), family=socket.AF_INET6):
            return ""
    except OSError as error:
        return f"this machine has no {HOST}: {error}"


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


@pytest.mark.parametrize("name", ENGINES_BETWEEN_PROCESSES)
def test_arrays_arrive(name: str) -> None:
    options = EngineOptions(channels=2, chunk_bytes=1 << 20, host=HOST)
    source, target = create_engine(name, options), create_engine(name, options)
    address = source.start()
    target.start()
    if name != "shm":
        assert f"[{HOST}]:" in address
    arrays = [random_array((3, 5), "bfloat16"), random_array((300, 4000), "float32", 1)]
    for _ in range(2):
        key = IDS.next_id()
        source.publish(key, arrays, 30.0)
        pull = target.pull(address, key, specs_of(arrays), 10.0)
        assert pull.wait(11.0)
        for left, right in zip(pull.result(), arrays, strict=True):
            same_bytes(left, right)
        source.release(key, delivered=True)
    self_test(source, address, [jax.ShapeDtypeStruct((4, 4), "int8")])
    wait_until(lambda: source.counters()["published_keys"] == 0)
    for engine in (source, target):
        engine.close()


@pytest.mark.parametrize("name", ENGINES_BETWEEN_PROCESSES)
def test_rooms_are_handed_over(name: str) -> None:
    before = _sockets()
    with pair(name, host=HOST) as both:
        both.carry_rooms()
        assert {address for address, _ in _sockets() - before} == {HOST}


def _sockets() -> set[tuple[str, int]]:
    """Returns the addresses of this process's TCP sockets, those that listen and connections."""
    sockets = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.laddr}
