# SPDX-License-Identifier: Apache-2.0
"""Two engines of a kind and what moves between them: for the tests that every engine must pass."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvferry.control.engines import shm_link
from kvferry.control.engines.base import (
    EngineOptions,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
)
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.engines.registry import create_engine
from kvferry.control.ids import IdSource

_BUILT_IN = ("fake", "jax", "tcp", "zmq", "shm", "auto")
# For engines of others: their names, with commas, instead of those above.
ENGINES = tuple(filter(None, os.environ.get("KVFERRY_TEST_ENGINES", "").split(","))) or _BUILT_IN
# The library below `jax` ends the process when it reads four zero bytes.
ENGINES_WITH_ROBUST_PORTS = ("tcp", "zmq", "shm", "auto")
# `jax` compares sizes only, the control layer compares the rest before it pulls; `fake` nothing.
ENGINES_THAT_TRUST_SPECS = ("jax", "fake")
# Their pulls end at once, and not by their deadline, when they cannot end well any more.
ENGINES_THAT_NOTICE = ("tcp", "zmq", "shm", "auto")
ENGINES_BETWEEN_PROCESSES = tuple(name for name in ENGINES if name != "fake")
IDS = IdSource()
DTYPES = (
    "bfloat16",
    "float32",
    "float16",
    "uint16",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
)


class Ends:
    """A publishing and a pulling engine, both started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._network = FakeNetwork()
        self.source, self.address = self.start()
        self.target, _ = self.start()

    def start(self) -> tuple[TransferEngine, str]:
        """Starts one more engine that the others can reach; returns it and its address."""
        made = self.make(self.name, self._network)
        return made, made.start()

    @staticmethod
    def make(name: str, network: FakeNetwork | None = None) -> TransferEngine:
        """Makes an engine that is not started."""
        options = EngineOptions(channels=2, chunk_bytes=1 << 20)
        return FakeEngine(options, network) if name == "fake" else create_engine(name, options)

    def pull(self, key: int, specs: Sequence[Spec], seconds: float = 10.0) -> Pull:
        return self.target.pull(self.address, key, specs, seconds)

    def move(
        self, arrays: Sequence[jax.Array], specs: Sequence[Spec] | None = None
    ) -> list[jax.Array]:
        key = IDS.next_id()
        self.source.publish(key, arrays, 60.0)
        pull = self.pull(key, specs or specs_of(arrays), 60.0)
        assert pull.wait(61.0)
        result = pull.result()
        self.source.release(key, delivered=True)
        return result

    def refused(
        self, key: int, specs: Sequence[Spec], *, address: str = "", seconds: float = 1.0
    ) -> str:
        """Pulls what must not arrive; returns the error."""
        try:
            pull = self.target.pull(address or self.address, key, specs, seconds)
            assert pull.wait(seconds + 5.0), "the pull does not end"
            arrived = pull.result()
        except TransferError as error:
            return str(error)
        raise AssertionError(f"{len(arrived)} arrays arrived")

    def at_baseline(self) -> bool:
        """Whether neither holds publications or pulls.

        A pull that `jax` has given up ends when the library gives it up, which may take for ever.
        """
        held = ("published_keys",) if self.name == "jax" else ("published_keys", "draining_pulls")
        counted = [engine.counters() for engine in (self.source, self.target)]
        return not any(each[name] for each in counted for name in held)

    @contextlib.contextmanager
    def mute(self) -> Iterator[str]:
        """The address of something that takes connections and never says a word."""
        if self.name not in _BUILT_IN:
            idle, address = self.start()
            yield address  # The next best: somebody who has nothing.
            idle.close()
            return
        if self.name == "shm":
            listener, address = shm_link.listen()
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        with listener:
            yield f"tcp={address}" if self.name == "auto" else address

    def dead_address(self) -> str:
        """An address at which nobody listens any more."""
        with self.mute() as address:
            return address

    def connect(self) -> socket.socket:
        """Opens a connection of a stranger to the publishing engine."""
        if self.name == "shm":
            made = shm_link.connect(self.address)
            made.settimeout(5.0)
            return made
        where = self.address
        if self.name == "auto":
            where = next(part[4:] for part in where.split(",") if part.startswith("tcp="))
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5.0)

    def close(self) -> None:
        self.source.close()
        self.target.close()


def specs_of(arrays: Sequence[jax.Array]) -> list[Spec]:
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).bytes(size)
    return jax.device_put(np.frombuffer(raw, np.uint8).view(jnp.dtype(dtype)).reshape(shape))


def same_bytes(left: jax.Array, right: jax.Array) -> None:
    assert (left.shape, left.dtype) == (right.shape, right.dtype)
    ours, theirs = (np.asarray(each).reshape(-1).view(np.uint8) for each in (left, right))
    np.testing.assert_array_equal(ours, theirs)


def num_files() -> int:
    """Returns how many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
