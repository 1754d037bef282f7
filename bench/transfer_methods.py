# SPDX-License-Identifier: Apache-2.0
"""Ways to get arrays from one process to another, each cut into a sending and a receiving half.

The sending half lives in a process of its own (transfer_source.py). A measurement asks it to offer
what it has under a key, and receives: until then nothing has moved.
"""

import abc
import dataclasses
import socket
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kvferry.control.engines.base import EngineOptions, TransferEngine
from kvferry.control.engines.registry import create_engine, engine_names

_ALIGNMENT = 64
_SECONDS = 60.0
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Payload:
    """What is moved.

    Attributes:
        num_bytes: In all.
        count: Arrays that it is cut into.
    """

    num_bytes: int
    count: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.num_bytes >> 20} MiB x {self.count}"

    def sizes(self) -> list[int]:
        """Returns the bytes of each array, multiples of 256."""
        each = self.num_bytes // self.count // 256 * 256
        return [each] * self.count

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the arrays, in bfloat16."""
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return [
            jax.ShapeDtypeStruct((size // 256, 128), ml_dtypes.bfloat16, sharding=device)
            for size in self.sizes()
        ]

    def content(self, index: int) -> np.ndarray:
        """Returns the bytes of one array, 64-byte aligned."""
        size = self.sizes()[index]
        found = aligned(size)
        found[:] = np.resize(np.random.default_rng(index).integers(0, 256, 65521, np.uint8), size)
        return found


def aligned(num_bytes: int) -> np.ndarray:
    """Returns memory that has been touched, 1-D uint8, at a multiple of 64."""
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    raw.fill(1)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes]


class Source(abc.ABC):
    """The sending half of a method."""

    @abc.abstractmethod
    def start(self) -> str:
        """Returns the address for the receiving half."""

    @abc.abstractmethod
    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """Makes arrays available, or sends them."""

    def release(self, key: int) -> None:  # noqa: B027 (most hold nothing)
        """Lets go of what was offered."""


class Target(abc.ABC):
    """The receiving half of a method."""

    @abc.abstractmethod
    def connect(self, address: str) -> None:
        """Prepares for transfers."""

    @abc.abstractmethod
    def receive(self, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """Returns what was offered, ready for use; arrays, or their bytes."""

    def prepare(self, payload: Payload) -> None:  # noqa: B027 (most have nothing to prepare)
        """Called before a payload is measured, untimed."""


class EngineSource(Source):
    """A transfer engine of this package."""

    def __init__(self, name: str, options: EngineOptions) -> None:
        self.engine: TransferEngine = create_engine(name, options)

    def start(self) -> str:
        """See `Source`."""
        return self.engine.start()

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """See `Source`."""
        self.engine.publish(key, arrays, _SECONDS)

    def release(self, key: int) -> None:
        """See `Source`."""
        self.engine.release(key, delivered=True)


class EngineTarget(Target):
    """A transfer engine of this package."""

    def __init__(self, name: str, options: EngineOptions) -> None:
        self._engine = create_engine(name, options)

    def connect(self, address: str) -> None:
        """See `Target`."""
        self._engine.start()
        self._address = address

    def receive(self, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """See `Target`."""
        pull = self._engine.pull(self._address, key, specs, _SECONDS)
        pull.wait(_SECONDS + 1.0)
        return pull.result()


@dataclasses.dataclass(frozen=True)
class RawSettings:
    """How somebody starts the library."""

    transports: int
    chunk_bytes: int
    copies: int

    def start(self) -> Any:
        """Returns a server."""
        from jax.experimental import transfer

        return transfer.start_transfer_server(
            jax.local_devices()[0].client,
            f"{_LOOPBACK}:0",
            [f"{_LOOPBACK}:0"] * self.transports,
            max_num_parallel_copies=self.copies,
            transfer_size=self.chunk_bytes,
        )


class RawSource(Source):
    """`jax.experimental.transfer` used directly."""

    def __init__(self, settings: RawSettings) -> None:
        self._settings = settings

    def start(self) -> str:
        """See `Source`."""
        self._server = self._settings.start()
        return str(self._server.address())

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """See `Source`."""
        self._server.await_pull(key, list(arrays))


class RawTarget(Target):
    """`jax.experimental.transfer` used directly."""

    def __init__(self, settings: RawSettings) -> None:
        self._settings = settings

    def connect(self, address: str) -> None:
        """See `Target`."""
        self._server = self._settings.start()
        self._connection = self._server.connect(address)

    def receive(self, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """See `Target`."""
        return jax.block_until_ready(self._connection.pull(key, list(specs)))


class SocketSource(Source):
    """Plain TCP: each stream sends its share of each array when it is asked for it."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._views: list[np.ndarray] = []

    def start(self) -> str:
        """See `Source`."""
        self._listener = socket.create_server((_LOOPBACK, 0))
        for _ in range(self._streams):
            threading.Thread(target=self._serve, daemon=True).start()
        return f"{_LOOPBACK}:{self._listener.getsockname()[1]}"

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """See `Source`."""
        self._views = [np.asarray(array).reshape(-1).view(np.uint8) for array in arrays]

    def release(self, key: int) -> None:
        """See `Source`."""
        self._views = []

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := peer.recv(1):
            for view in self._views:
                peer.sendall(share(view, asked[0], self._streams).data)


class SocketTarget(Target):
    """Plain TCP into memory that exists already, of which JAX makes arrays without a copy."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._memory: list[np.ndarray] = []

    def connect(self, address: str) -> None:
        """See `Target`."""
        host, _, port = address.rpartition(":")
        self._peers = []
        for _ in range(self._streams):
            self._peers.append(socket.create_connection((host, int(port))))
            self._peers[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, payload: Payload) -> None:
        """See `Target`."""
        self._memory = [aligned(size) for size in payload.sizes()]

    def receive(self, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """See `Target`."""
        threads = []
        for index, peer in enumerate(self._peers):
            peer.sendall(bytes([index]))
        for index, peer in enumerate(self._peers):
            parts = [share(view, index, self._streams) for view in self._memory]
            if self._streams == 1:
                _receive(peer, parts)
                break
            threads.append(threading.Thread(target=_receive, args=(peer, parts)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        host = [
            memory.view(spec.dtype).reshape(spec.shape)
            for memory, spec in zip(self._memory, specs, strict=True)
        ]
        return jax.block_until_ready(jax.device_put(host, [spec.sharding for spec in specs]))


class NoSource(Source):
    """Nothing is sent: the receiving process has it already."""

    def start(self) -> str:
        """See `Source`."""
        return ""

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """See `Source`."""


class MemcpyTarget(Target):
    """One thread copies from memory to memory that exists already."""

    def connect(self, address: str) -> None:
        """See `Target`."""

    def prepare(self, payload: Payload) -> None:
        """See `Target`."""
        self._from = [payload.content(index) for index in range(payload.count)]
        self._to = [aligned(size) for size in payload.sizes()]

    def receive(self, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """See `Target`."""
        for source, target in zip(self._from, self._to, strict=True):
            np.copyto(target, source)
        return self._to


def _own_settings() -> RawSettings:
    own = EngineOptions()
    return RawSettings(own.channels, own.chunk_bytes, own.parallel_copies)


PEERS: Mapping[str, RawSettings] = MappingProxyType(
    {
        "tpu-inference's settings": RawSettings(8, 256 << 20, 8),
        "sglang-jax's settings": RawSettings(1, 64 << 20, 4),
    }
)
# What the settings of the jax engine give without the engine.
RAW: Mapping[str, RawSettings] = MappingProxyType(
    {**PEERS, "the jax engine's settings": _own_settings()}
)
MEMCPY = "memcpy"
PLAIN = "plain TCP"
_STREAMS = MappingProxyType({PLAIN: 1, "plain TCP x 4": 4})


def method_names(engines: Sequence[str]) -> list[str]:
    """Returns all methods: baselines first, then engines, then the peers' settings.

    Args:
        engines: Which engines; "jax:8:1048576" is `jax` with so many channels and chunk bytes.
    """
    return [MEMCPY, *_STREAMS, *engines, *RAW]


def unknown_engine(name: str) -> bool:
    """Returns whether no engine has this name."""
    return name.split(":")[0] not in engine_names()


def make_source(name: str) -> Source:
    """Makes the sending half of a method."""
    if name == MEMCPY:
        return NoSource()
    if name in _STREAMS:
        return SocketSource(_STREAMS[name])
    if name in RAW:
        return RawSource(RAW[name])
    return EngineSource(*_engine(name))


def make_target(name: str) -> Target:
    """Makes the receiving half of a method."""
    if name == MEMCPY:
        return MemcpyTarget()
    if name in _STREAMS:
        return SocketTarget(_STREAMS[name])
    if name in RAW:
        return RawTarget(RAW[name])
    return EngineTarget(*_engine(name))


def share(view: np.ndarray, index: int, count: int) -> np.ndarray:
    """Returns the part of an array that one of several streams carries."""
    return view[len(view) * index // count : len(view) * (index + 1) // count]


def _engine(name: str) -> tuple[str, EngineOptions]:
    engine, *numbers = name.split(":")
    fields = ("channels", "chunk_bytes", "parallel_copies")
    given: dict[str, Any] = dict(zip(fields, map(int, numbers), strict=False))
    return engine, EngineOptions(**given)


def _receive(peer: socket.socket, parts: Sequence[np.ndarray]) -> None:
    for part in parts:
        if peer.recv_into(part.data, len(part), socket.MSG_WAITALL) != len(part):
            raise ConnectionError("the sending process has closed a stream")
