# SPDX-License-Identifier: Apache-2.0
"""A process with a jax engine, for the tests in which one freezes or wedges.

    python -m kvferry.tests.control.jax_engine_peer publish
    python -m kvferry.tests.control.jax_engine_peer freeze <address> <key>
    python -m kvferry.tests.control.jax_engine_peer die <address> <key>
    python -m kvferry.tests.control.jax_engine_peer wedge <address> <key>...
    python -m kvferry.tests.control.jax_engine_peer leave <address> <key>...

`publish` prints its address and serves until its input ends. `freeze` stops itself, and `die` ends
itself, in the middle of a pull. `wedge` pulls what is too small, key after key, and prints what the
engine's health is then. `leave` ends as any program does, while its pulls have not ended.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp

from kvferry.control.engines import jax_watch
from kvferry.control.engines.base import EngineOptions, TransferError
from kvferry.control.engines.jax_engine import JaxEngine

COPIES = 4
OPTIONS = EngineOptions(channels=2, chunk_bytes=1 << 20, parallel_copies=COPIES)
PIECES = [jax.ShapeDtypeStruct((2 << 20,), jnp.float32)] * 16
SMALL = jax.ShapeDtypeStruct((1024,), jnp.float32)
TOO_SMALL = jax.ShapeDtypeStruct((1000,), jnp.float32)


def end_in_between(engine: JaxEngine, address: str, key: int, number: int) -> None:
    pull = engine.pull(address, key, PIECES, 60.0)
    while not pull.progress:
        pull.wait(0.001)
    os.kill(os.getpid(), number)


def wedge(engine: JaxEngine, address: str, keys: list[int]) -> None:
    for key in keys:
        pull = engine.pull(address, key, [TOO_SMALL], 5.0)
        pull.wait(6.0)
        try:
            pull.result()
        except TransferError as error:
            print(f"pull: {error}", flush=True)
    until = time.monotonic() + 4.0 * jax_watch._TICKS_UNTIL_FAILURE
    while engine.failure is None and time.monotonic() < until:
        time.sleep(0.01)
    print(f"health: {engine.failure}", flush=True)


def main() -> None:
    jax_watch._TICKS_UNTIL_FAILURE = 5  # A second instead of ten.
    role, *arguments = sys.argv[1:]
    engine = JaxEngine(OPTIONS)
    own = engine.start()
    if role == "publish":
        engine.publish(1, [jnp.ones(1024)], 60.0)
        print(own, flush=True)
        sys.stdin.read()
    elif role in ("freeze", "die"):
        number = signal.SIGSTOP if role == "freeze" else signal.SIGKILL
        end_in_between(engine, arguments[0], int(arguments[1]), number)
    elif role == "leave":
        keys = map(int, arguments[1:])
        pulls = [engine.pull(arguments[0], key, PIECES, 60.0) for key in keys]
        pulls[0].cancel()
        print(f"waiting: {[pull.wait(0.1) for pull in pulls[1:]]}", flush=True)
        sys.exit(0)
    else:
        wedge(engine, arguments[0], list(map(int, arguments[1:])))
    os._exit(0)


if __name__ == "__main__":
    main()
