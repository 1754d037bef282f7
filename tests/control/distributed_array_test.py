# SPDX-License-Identifier: Apache-2.0
"""An array of which other processes hold a part is refused by every engine, and nothing else is.

Two real processes under `jax.distributed`, each with one CPU device: no array of one process alone
is of that kind.
"""

import json
import socket
import subprocess
import sys

import pytest

from kvferry.tests.control.engine_ends import ENGINES_BETWEEN_PROCESSES

_PROCESS = """
import json
import sys
import jax
import numpy as np
from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.registry import create_engine

address, number, *engines = sys.argv[1:]
jax.distributed.initialize(address, 2, int(number), initialization_timeout=60)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
local = np.ones((2, 3), np.float32)
shared = jax.make_array_from_process_local_data(sharding, local)
assert shared.shape == (4, 3) and not shared.is_fully_addressable

def publish(engine, key, arrays):
    try:
        engine.publish(key, arrays, 30.0)
    except ValueError as error:
        return str(error)
    return "published"

told = {}
for name in engines:
    engine = create_engine(name, EngineOptions(channels=2))
    engine.start()
    own = shared.addressable_data(0)
    told[name] = [publish(engine, 5, [own, shared]), publish(engine, 5, [own])]
    engine.release(5, delivered=False)
    told[name].append(engine.counters()["published_keys"])
    engine.close()
print(json.dumps(told))
jax.distributed.shutdown()
"""


@pytest.fixture(name="told", scope="module")
def _told() -> dict[str, list[str | int]]:
    """What each engine says of such an array, and of this process's own part of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", _PROCESS, address]
    processes = [
        subprocess.Popen([*command, number, *ENGINES_BETWEEN_PROCESSES], stdout=subprocess.PIPE)
        for number in ("0", "1")
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    return dict(first)


@pytest.mark.parametrize("name", ENGINES_BETWEEN_PROCESSES)
def test_it_is_refused_by_name_and_ones_own_part_is_not(
    told: dict[str, list[str | int]], name: str
) -> None:
    refusal, own_part, held = told[name]
    assert "cannot publish 5: array 1" in str(refusal)
    assert "other processes" in str(refusal) or "not all in this process" in str(refusal)
    assert own_part == "published" and held == 0
