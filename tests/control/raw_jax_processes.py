# SPDX-License-Identifier: Apache-2.0
"""Two processes that use `jax.experimental.transfer` directly, and may crash of it.

A publisher does as it is told; a puller tells it and says what it saw. Both are forked from a
process that has imported JAX but not used it, which makes them cheap, and both end in bounded time.
Only JAX and numpy are needed.
"""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_BOUND_SECONDS = 25.0
_HANG_SECONDS = 1.0
END_SECONDS = 10.0
MIB = 1 << 20
DEVICES = 4


class Gone(Exception):  # noqa: N818 (an outcome, not an error)
    """The other process has died."""


class Channel:
    """JSON lines between the two processes of a scenario."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("r")

    def say(self, value: Any) -> None:
        try:
            self._end.sendall((json.dumps(value) + "\n").encode())
        except OSError as error:
            raise Gone from error

    def hear(self) -> Any:
        line = self._file.readline()
        if not line:
            raise Gone
        return json.loads(line)


def start_server(
    transports: int = 2,
    chunk_bytes: int = MIB,
    copies: int = 4,
    raw: bool = False,
    address: str = "127.0.0.1:0",
) -> Any:
    return transfer.start_transfer_server(
        jax.local_devices()[0].client,
        address,
        ["127.0.0.1:0"] * transports,
        max_num_parallel_copies=copies,
        transfer_size=chunk_bytes,
        use_raw_buffers=raw,
    )


def sharding(parts: Sequence[str | None] | None, devices: int = DEVICES) -> Any:
    if parts is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("x",)), PartitionSpec(*parts))


def numbers(shape: Sequence[int], first: float = 0.0) -> np.ndarray:
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


class Publisher:
    """What a publisher can be told to do."""

    def start(self, **options: Any) -> str:
        self._options = options
        self._server = start_server(**options)
        return str(self._server.address())

    def start_second(self) -> str:
        options = self._options | {"address": self._server.address()}
        self._second = start_server(**options)
        return str(self._second.address())

    def publish(
        self,
        key: int,
        shapes: list[list[int]],
        parts: list[str | None] | None = None,
        first: float = 0.0,
    ) -> None:
        arrays = [jax.device_put(numbers(shape, first), sharding(parts)) for shape in shapes]
        self._server.await_pull(key, arrays)

    def publish_for_4_and_1(self, key: int, shape: list[int]) -> None:
        cut = jax.device_put(numbers(shape), sharding(["x", None]))
        whole = jax.device_put(numbers([1, shape[1]], -1000.0), sharding(None))
        self._server.await_pull(key, [cut, whole])

    def publish_column_major(self, key: int, shape: list[int]) -> None:
        place = Format(Layout((1, 0)), sharding(None))
        self._server.await_pull(key, [jax.device_put(jnp.asarray(numbers(shape)), place)])

    def publish_then_donate(self, key: int, shape: list[int]) -> None:
        array = jnp.asarray(numbers(shape)) + 0
        array.block_until_ready()
        self._server.await_pull(key, [array])
        jax.jit(lambda x: x + 5, donate_argnums=0)(array).block_until_ready()

    def publish_deleted(self, key: int) -> str:
        array = jnp.ones(1024) + 1
        array.delete()
        try:
            self._server.await_pull(key, [array])
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return "accepted"

    def nothing(self) -> None:
        time.sleep(0.005)

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Puller:
    """The telling side of a scenario; what it returns is what was seen."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.address = ""

    def tell(self, name: str, *args: Any, **options: Any) -> Any:
        self._channel.say([name, args, options])
        return self._channel.hear()

    def tell_without_answer(self, name: str) -> None:
        self._channel.say([name, (), {}])

    def until_gone(self) -> str:
        """Has the publisher talk until it dies, so that it does not end by itself before that."""
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until:
            self.tell("nothing")
        return "survives"

    def begin(
        self, publisher: dict[str, Any] | None = None, puller: dict[str, Any] | None = None
    ) -> Any:
        """Starts both servers; returns a connection."""
        self.address = self.tell("start", **(publisher or {}))
        self.server = start_server(**(puller or {}))
        return self.server.connect(self.address)


def spec(
    shape: Sequence[int], dtype: Any = jnp.float32, parts: Any = None, devices: int = DEVICES
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding(parts, devices))


def outcome(array: Any, expected: np.ndarray | None = None, seconds: float = END_SECONDS) -> str:
    """Returns "hangs", "error: ...", "other bytes" or "arrived"."""
    until = time.monotonic() + seconds
    while not array.is_ready():
        if time.monotonic() > until:
            return "hangs"
        time.sleep(0.001)
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return f"error: {error}"
    if expected is not None and np.asarray(array).tobytes() != expected.tobytes():
        return "other bytes"
    return "arrived"


def hangs(array: Any) -> str:
    return outcome(array, seconds=_HANG_SECONDS)


def _publish(channel: Channel) -> None:
    publisher = Publisher()
    while True:
        name, args, options = channel.hear()
        channel.say(getattr(publisher, name)(*args, **options))


def _fork(role: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # Aborting libraries write stack traces.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(Gone, jax.errors.JaxRuntimeError):
        role()
    os._exit(0)


def _end(pid: int, seconds: float) -> str:
    """Returns how a process ended: "ends", "crashes" (by a signal), or that it "lives" on."""
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "crashes" if os.WIFSIGNALED(status) else "ends"
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "lives"
        time.sleep(0.002)


def play(scenario: Callable[[Puller], list[str]]) -> dict[str, Any]:
    """Plays one scenario; returns what its puller saw and how both processes ended."""
    start = time.monotonic()
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()

    def pull() -> None:
        theirs.close()
        os.write(writer, json.dumps(scenario(Puller(Channel(ours)))).encode())

    def publish() -> None:
        ours.close()
        _publish(Channel(theirs))

    puller, publisher = _fork(pull), _fork(publish)
    for each in (ours, theirs):
        each.close()
    os.close(writer)
    puller_end = _end(puller, _BOUND_SECONDS)
    publisher_end = _end(publisher, 0.5)
    os.set_blocking(reader, False)
    seen = []
    with contextlib.suppress(BlockingIOError, ValueError):
        seen = json.loads(os.read(reader, 1 << 16))
    name = scenario.__name__.upper()
    seconds = round(time.monotonic() - start, 1)
    return {
        "seconds": seconds,
        "name": name,
        "saw": seen,
        "puller": puller_end,
        "publisher": publisher_end,
    }
