# SPDX-License-Identifier: Apache-2.0
"""Shows on `jax.experimental.transfer` itself what the jax engine guards against.

    python -m kvferry.tests.control.raw_jax_transfer S1 H2 ...

runs those scenarios, or all, and prints one JSON line for each: what the puller saw, and how both
processes ended.
"""

import collections
import datetime
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kvferry.tests.control.raw_jax_processes import (
    DEVICES,
    END_SECONDS,
    MIB,
    Puller,
    hangs,
    numbers,
    outcome,
    play,
    spec,
    start_server,
)

_AT_ONCE = 4


def s1(d: Puller) -> list[str]:
    connection = d.begin({"chunk_bytes": 4 * MIB, "transports": 1}, {"transports": 1})
    d.tell("publish", 1, [[MIB // 2]], first=7.0)
    d.tell("publish", 2, [[1024]])
    d.tell("publish", 3, [[1024]])
    hangs(connection.pull(1, [spec([MIB // 2])])[0])
    (after,) = connection.pull(2, [spec([1024])])
    (fresh,) = d.server.connect(d.address).pull(3, [spec([1024])])
    return [outcome(after, numbers([1024])), outcome(fresh, numbers([1024]))]


def s2(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[1024]] * 3)
    wanted = [spec([1024], jnp.int32), spec([2048], jnp.bfloat16), spec([32, 32])]
    return [outcome(array, numbers([1024])) for array in connection.pull(1, wanted)]


def s3(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[4, 4]], parts=["x", None])
    return [outcome(connection.pull(1, [spec([4, 4], parts=[None, "x"])])[0], numbers([4, 4]))]


def s4(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish_for_4_and_1", 1, [4, 256])
    wanted = [spec([2, 256], parts=["x", None], devices=2), spec([1, 256])]
    second = connection.pull(1, wanted)[1]
    return [outcome(second, numbers([1, 256], 512.0))]  # Row 2 of the first array.


def s5(d: Puller) -> list[str]:
    connection = d.begin({"transports": 1, "copies": 8}, {"transports": 1, "copies": 8})
    wanted, head = spec([7 * MIB // 4]), numbers([7 * MIB // 4])
    for key in range(6):  # What is too much may come before the array counts as complete.
        d.tell("publish", key, [[3 * MIB]])
        seen = outcome(connection.pull(key, [wanted])[0], head, END_SECONDS / 5)
        if seen == "arrived":
            break
        connection = d.server.connect(d.address)
    return [seen]


def s6(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish_column_major", 1, [4, 8])
    return [outcome(connection.pull(1, [spec([4, 8])])[0], numbers([4, 8]))]


def s7(d: Puller) -> list[str]:
    connection = d.begin({"raw": True}, {"raw": True})
    d.tell("publish_then_donate", 1, [1024])
    return [outcome(connection.pull(1, [spec([1024])])[0], numbers([1024]))]


def s8(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[1024]])
    d.tell("publish", 1, [[1024]], first=9.0)
    first, second = (connection.pull(1, [spec([1024])])[0] for _ in range(2))
    return [outcome(first, numbers([1024])), hangs(second)]


def s9(d: Puller) -> list[str]:
    d.begin({"transports": 1}, {"transports": 1})
    if d.tell("start_second") != d.address:
        return ["another port"]
    keys = range(30)
    for key in keys:
        d.tell("publish", key, [[8]])
    connections = [d.server.connect(d.address) for _ in keys]
    arrays = [c.pull(key, [spec([8])])[0] for key, c in zip(keys, connections, strict=True)]
    seen = collections.Counter(hangs(array) for array in arrays[:1]) + collections.Counter(
        outcome(array, seconds=0.01) for array in arrays[1:]
    )
    return sorted(seen)


def s10(d: Puller) -> list[str]:
    hosts = ["localhost", "256.1.1.1"]
    return [str(start_server(address=f"{host}:0").address()).split(":")[0] for host in hosts]


def s11(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[512 * 512]], first=3.0)

    def slow(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 60, lambda _, y: y @ x * 0.5, x).reshape(-1)

    compiled = jax.jit(slow).lower(spec([512, 512])).compile()
    computed = compiled(jnp.ones((512, 512)) / 256)
    tokens = connection._pull_into_flat(1, [computed], [slice(0, 512 * 512 * 4)])
    tokens = jax.block_until_ready(tokens)
    return [outcome(computed, numbers([512 * 512], 3.0))]


def a1(d: Puller) -> list[str]:
    connection = d.begin({"transports": 0})
    d.tell("publish", 1, [[1024]])
    outcome(connection.pull(1, [spec([1024])])[0])
    return [d.until_gone()]


def a2(d: Puller) -> list[str]:
    connection = d.begin({"transports": 3}, {"transports": 1})
    d.tell("publish", 1, [[1024]])
    return [outcome(connection.pull(1, [spec([1024])])[0], numbers([1024]))]


def a3(d: Puller) -> list[str]:
    d.begin()
    host, port = d.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(bytes(4))
        return [d.until_gone()]


def a4(d: Puller) -> list[str]:
    d.begin()
    return [d.tell("publish_deleted", 1)]


def a5(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[1024]])
    dest = jnp.zeros(1024).block_until_ready()
    jax.block_until_ready(connection._pull_into_flat(1, [dest], [slice(0, 4000)]))
    return ["survives"]


def a5_deleted(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[1024]])
    dest = jnp.zeros(1024) + 1
    dest.delete()
    jax.block_until_ready(connection._pull_into_flat(1, [dest], [slice(0, 4096)]))
    return ["survives"]


def a6(d: Puller) -> list[str]:
    connection = d.begin()
    # A thread that wakes up too late for it does not abort the process: hence several.
    never = [connection.pull(key, [spec([1024])])[0] for key in range(32)]
    for array in never:
        threading.Thread(target=array.block_until_ready, daemon=True).start()
    hangs(never[0])
    sys.exit()  # An ordinary end of the program.


def w1(d: Puller) -> list[str]:
    connection = d.begin({"copies": 2}, {"copies": 2})
    for key in range(3):
        d.tell("publish", key, [[1024]])
    for key in range(2):
        outcome(connection.pull(key, [spec([1000])])[0])
    return [hangs(d.server.connect(d.address).pull(2, [spec([1024])])[0])]


def w2(d: Puller) -> list[str]:
    d.begin({"transports": 4}, {"transports": 4})
    shape = [2 * MIB]
    for key in range(60):
        connection = d.server.connect(d.address)
        d.tell("publish", key, [shape] * 8)
        arrays = connection.pull(key, [spec(shape)] * 8)
        if outcome(arrays[0], seconds=3.0) == "hangs":
            return ["hangs"]
        connection._poison_connection()
    return ["survives"]


def w3(d: Puller) -> list[str]:
    address = d.tell("start")
    shapes = [[2 * MIB]] * 16
    for key in (1, 2):
        d.tell("publish", key, shapes)
    other = os.fork()
    if not other:
        arrays = start_server().connect(address).pull(1, [spec(shape) for shape in shapes])
        outcome(arrays[0])
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(other, os.WUNTRACED)
    array = start_server().connect(address).pull(2, [spec(shape) for shape in shapes])[-1]
    during = hangs(array)
    os.kill(other, signal.SIGKILL)
    return [during, outcome(array, numbers([2 * MIB]))]


def w4(d: Puller) -> list[str]:
    address = d.tell("start", copies=2)
    for key in range(20):
        d.tell("publish", key, [[2 * MIB]] * 16)
        other = os.fork()
        if not other:
            wanted = [spec([2 * MIB])] * 16
            (first, *_) = start_server(copies=2).connect(address).pull(key, wanted)
            os.kill(os.getpid(), signal.SIGTERM if hangs(first) == "hangs" else signal.SIGKILL)
        if os.WTERMSIG(os.waitpid(other, 0)[1]) == signal.SIGTERM:
            break
    d.tell("publish", 100, [[1024]])
    return [hangs(start_server(copies=2).connect(address).pull(100, [spec([1024])])[0])]


def h1(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[1024]])
    first, second, never = (connection.pull(key, [spec([1024])])[0] for key in (1, 1, 2))
    return [outcome(first, numbers([1024])), hangs(second), hangs(never)]


def h2(d: Puller) -> list[str]:
    d.begin()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [hangs(d.server.connect(f"127.0.0.1:{port}").pull(1, [spec([8])])[0])]


def h3(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[8], [0]])
    full, empty = connection.pull(1, [spec([8]), spec([0])])
    return [outcome(full, numbers([8])), hangs(empty)]


def h4(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell("publish", 1, [[8]] * 65)
    arrays = connection.pull(1, [spec([8])] * 70)
    return [outcome(arrays[64], numbers([8])), hangs(arrays[65])]


def h5(d: Puller) -> list[str]:
    connection = d.begin()
    d.tell_without_answer("freeze")
    timeout = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.1)
    (array,) = connection.pull(1, [spec([8])], timeout=timeout)
    return [outcome(array, seconds=2.0)]


def h6(d: Puller) -> list[str]:
    connection = d.begin({}, {"transports": 0})
    d.tell("publish", 1, [[8]])
    return [hangs(connection.pull(1, [spec([8])])[0])]


SCENARIOS: tuple[Callable[[Puller], list[str]], ...] = (
    *(s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11),
    *(a1, a2, a3, a4, a5, a5_deleted, a6, w1, w2, w3, w4, h1, h2, h3, h4, h5, h6),
)


def main(names: Sequence[str]) -> None:
    """Plays scenarios, a few at a time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jax.config.update("jax_num_cpu_devices", DEVICES)
    running: set[int] = set()
    for scenario in SCENARIOS:
        if names and scenario.__name__.upper() not in names:
            continue
        if len(running) >= _AT_ONCE:
            running.discard(os.wait()[0])
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            line = json.dumps(play(scenario)) + "\n"
            os.write(1, line.encode())
            os._exit(0)
        running.add(pid)
    for pid in running:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
