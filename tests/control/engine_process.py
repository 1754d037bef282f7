# SPDX-License-Identifier: Apache-2.0
"""A transfer engine in a process of its own, driven over its standard input.

Run as a program with the name of an engine it reads one JSON command per line and answers with one
JSON line. `EngineProcess` is the other end of that.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from kvferry.tests.control.pairs import wait_until


class EngineProcess:
    """Starts and drives such a process.

    Args:
        name: Of the engine.
    """

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.tests.control.engine_process", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = str(self._read())

    def __call__(self, command: str, **values: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **values}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine process ended with {self.process.wait()}"
        return json.loads(line)

    def freeze(self) -> None:
        """Stops it; returns when each of its threads stands still."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        wait_until(
            lambda: all(") T " in (each / "stat").read_text() for each in tasks.iterdir()),
            what="all threads stopped",
        )

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=20)


@contextlib.contextmanager
def engine_process(name: str) -> Iterator[EngineProcess]:
    """Runs one and ends it afterwards, killed or not."""
    made = EngineProcess(name)
    try:
        yield made
    finally:
        made.close()


class _Inside:
    def __init__(self, name: str) -> None:
        from kvferry.control.engines.base import EngineOptions
        from kvferry.control.engines.registry import create_engine

        self.engine = create_engine(name, EngineOptions(channels=2))
        self.address = self.engine.start()
        self._held: dict[int, Any] = {}

    def publish(self, key: int, shape: list[int], dtype: str, count: int) -> None:
        from kvferry.tests.control.engine_ends import random_array

        arrays = [random_array(tuple(shape), dtype, seed) for seed in range(count)]
        self.engine.publish(key, arrays, 60.0)

    def release(self, key: int, delivered: bool) -> None:
        self.engine.release(key, delivered=delivered)

    def pull(self, address: str, key: int, shape: list[int], dtype: str, count: int) -> bool:
        """Pulls what such a process has published, keeps it, and tells whether it is right."""
        import jax
        import numpy as np

        from kvferry.tests.control.engine_ends import random_array

        specs = [jax.ShapeDtypeStruct(shape, dtype)] * count
        pull = self.engine.pull(address, key, specs, 20.0)
        pull.wait(21.0)
        self._held[key] = pull.result()
        return all(
            np.asarray(array).tobytes()
            == np.asarray(random_array(tuple(shape), dtype, seed)).tobytes()
            for seed, array in enumerate(self._held[key])
        )

    def start_pull(self, address: str, key: int, shape: list[int], dtype: str, count: int) -> None:
        import jax

        specs = [jax.ShapeDtypeStruct(shape, dtype)] * count
        self._held[key] = self.engine.pull(address, key, specs, 20.0)

    def drop(self, key: int) -> None:
        import gc

        del self._held[key]
        gc.collect()  # JAX lets go of what it was given outside of Python here.

    def counters(self) -> dict[str, int]:
        return self.engine.counters()


def main() -> None:
    """Serves commands until the input ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever a library prints must not get between the answers.
    inside = _Inside(sys.argv[1])
    print(json.dumps(inside.address), file=output, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(inside, request.pop("command"))(**request)
        print(json.dumps(answer), file=output, flush=True)
    inside.engine.close()


if __name__ == "__main__":
    main()
