# SPDX-License-Identifier: Apache-2.0
"""A transfer engine on plain TCP: parallel streams straight into the memory of the arrays.

On CPU it is faster than `jax.experimental.transfer`, because a byte is copied twice and not four
times; and a peer that stops to read blocks nobody else. Errors travel in band, so a pull that
cannot succeed ends at once.
"""

import collections
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
    TransferTimeoutError,
)
from kvferry.control.engines.canary import default_sharding
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.engines.tcp_frames import (
    ALIGNMENT,
    CHALLENGE_BYTES,
    NONCE_BYTES,
    FrameError,
    offsets,
    pack_request,
    read_grant,
    receive,
    receive_parts,
    set_timeouts,
)
from kvferry.control.engines.tcp_server import TcpServer
from kvferry.control.security import PortInUseError, check_advertise, host_port
from kvferry.control.workers import WorkerPool

_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_POOLS_PER_CHANNEL = 4
_STREAM_BYTES = 2 << 20
_MAX_QUEUED = 65536


class _GivenUp(Exception):  # noqa: N818 (a signal within this module, not an error)
    """The pull that a stream belongs to has ended."""


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


class _Connections:
    """Idle connections by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[socket.socket]] = collections.defaultdict(list)

    def take(self, address: str) -> socket.socket | None:
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def give_back(self, address: str, peer: socket.socket) -> None:
        with self._lock:
            self._idle[address].append(peer)

    def drop(self, address: str) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
        for peer in idle:
            peer.close()

    def drop_all(self) -> None:
        for address in list(self._idle):
            self.drop(address)

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    set_timeouts(peer, _LOOK_SECONDS, _CONNECT_SECONDS)
    return peer


class _TcpPull(Pull):
    def __init__(
        self, source: tuple[str, int], specs: Sequence[Spec], channels: int, seconds: float
    ) -> None:
        self.address, self.key = source
        self.specs = list(specs)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        sizes = [spec.size * spec.dtype.itemsize for spec in specs]
        starts, total = offsets(sizes)
        self._buffer = _aligned(total)
        self.views = [
            self._buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)
        ]
        # A small transfer is faster on one stream than split over threads.
        self.count = max(1, min(channels, total // _STREAM_BYTES))
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._changed = threading.Condition()
        self.running = self.count
        self._done = 0
        self._error: TransferError | None = None

    @property
    def ended(self) -> bool:
        return self._error is not None or self._done == self.count

    def wait(self, timeout_seconds: float) -> bool:
        until = min(time.monotonic() + timeout_seconds, self._until)
        with self._changed:
            while not self.ended and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if not self.ended and time.monotonic() >= self._until:
                done = f"{self._done} of {self.count} streams had arrived"
                self._error = TransferTimeoutError(
                    f"{self._label}: not done in {self._seconds:.1f} s, {done}"
                )
            return self.ended

    def result(self) -> list[jax.Array]:
        if self._error is not None:
            raise self._error
        if not self.ended:
            raise TransferError(f"{self._label}: has not ended")
        host = [
            view.view(spec.dtype).reshape(spec.shape)
            for view, spec in zip(self.views, self.specs, strict=True)
        ]
        # Aligned, so that on CPU the arrays are these bytes and no copy of them.
        places = [spec.sharding or default_sharding() for spec in self.specs]
        return list(jax.device_put(host, places))

    def cancel(self) -> None:
        self.fail(TransferError(f"{self._label}: cancelled"))

    def fail(self, error: TransferError) -> None:
        with self._changed:
            if not self.ended:
                self._error = error
            self._changed.notify_all()

    def check(self) -> None:
        if self._error is not None or time.monotonic() >= self._until:
            raise _GivenUp

    def finish_stream(self, problem: str) -> None:
        with self._changed:
            self.running -= 1
            if not problem:
                self._done += 1
            elif not self.ended:
                self._error = TransferError(f"{self._label}: {problem}")
            self._changed.notify_all()

    @property
    def _label(self) -> str:
        return f"pull {self.key} from {self.address}"


@transfer_engine("tcp")
class TcpEngine(TransferEngine):
    """Moves arrays over TCP.

    Args:
        options: `host` must be numeric and not a wildcard. `channels` is the largest number
            of streams of one pull; the two ends need not agree on it.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._server: TcpServer | None = None
        self._idle = _Connections()
        size = options.channels * _POOLS_PER_CHANNEL
        self._workers = WorkerPool("kv-tcp-pull", size, _MAX_QUEUED)
        self._pulls: set[_TcpPull] = set()
        self._lock = threading.Lock()

    def start(self) -> str:
        """Listens.

        Returns:
            The address, "ip:port".

        Raises:
            PortInUseError: If the port is taken.
            EngineStartError: If the address is a wildcard, not numeric, or not of this machine.
        """
        host, port = self.options.host, self.options.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            check_advertise(host)
            listener = socket.create_server((host, port), family=family, backlog=512)
        except ValueError as error:
            raise EngineStartError(f"transfer engine 'tcp' cannot start: {error}") from error
        except OSError as error:
            where = host_port(host, port)
            if "in use" in str(error):
                raise PortInUseError(f"port {where} is taken by another process") from error
            raise EngineStartError(
                f"transfer engine 'tcp' cannot listen on {where}: {error}"
            ) from error
        self._server = TcpServer(listener)
        self._workers.start()
        return host_port(host, listener.getsockname()[1])

    def settings(self) -> Mapping[str, int | str]:
        """Returns nothing: each pull says how many streams it uses."""
        return {}

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Keeps the arrays until they are pulled and released.

        Args:
            key: One-shot id.
            arrays: What to publish.
            deadline_seconds: After this time they are dropped.

        Raises:
            ValueError: If `key` is published already or an array cannot travel.
            TransferError: If the engine is not running.
        """
        for index, array in enumerate(arrays):
            if array.is_deleted() or not array.is_fully_addressable:
                state = "deleted or donated" if array.is_deleted() else "not all in this process"
                raise ValueError(f"cannot publish {key}: array {index} is {state}")
        if self._server is None:
            raise TransferError(f"cannot publish {key}: transfer engine 'tcp' is not running")
        if not self._server.publish(key, list(arrays), deadline_seconds):
            raise ValueError(f"key {key} is published already; ids are for one use")

    def release(self, key: int, *, delivered: bool) -> None:
        """Drops what is published under `key`."""
        if self._server is not None:
            self._server.release(key)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts a pull.

        Args:
            address: The peer's address.
            key: What to pull.
            specs: What was published.
            deadline_seconds: Time from now after which it fails.

        Returns:
            The pull.

        Raises:
            TransferError: If the engine is not running or too many pulls wait.
        """
        pull = _TcpPull((address, key), specs, self.options.channels, deadline_seconds)
        if self._server is None:
            raise TransferError(f"pull {key}: transfer engine 'tcp' is not running")
        with self._lock:
            self._pulls.add(pull)
        for index in range(pull.count):
            if not self._workers.submit(
                self._stream_job(pull, index), lambda error: self._end(pull, repr(error))
            ):
                self._end(pull, "too many pulls wait")
        return pull

    def disconnect(self, address: str) -> None:
        """Closes idle connections to a peer."""
        self._idle.drop(address)

    def counters(self) -> dict[str, int]:
        """Returns published keys, ended pulls with streams that still run, idle connections."""
        with self._lock:
            draining = sum(pull.ended for pull in self._pulls)
        published = self._server.num_published if self._server is not None else 0
        return {
            "published_keys": published,
            "draining_pulls": draining,
            "connections": len(self._idle),
        }

    def close(self) -> None:
        """Closes everything; pulls in progress fail."""
        with self._lock:
            pulls = list(self._pulls)
        for pull in pulls:
            pull.cancel()
        self._workers.stop()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._idle.drop_all()

    def _stream_job(self, pull: _TcpPull, index: int) -> Callable[[], None]:
        def job() -> None:
            try:
                pull.check()
                problem = self._stream(pull, index)
            except _GivenUp:
                problem = "given up"
            except (OSError, ValueError) as error:
                problem = str(error)
            self._end(pull, problem)

        return job

    def _end(self, pull: _TcpPull, problem: str) -> None:
        pull.finish_stream(problem)
        if pull.running == 0:
            with self._lock:
                self._pulls.discard(pull)

    def _stream(self, pull: _TcpPull, index: int) -> str:
        """Receives one stream; returns what was wrong, or an empty text."""
        peer, fresh = self._idle.take(pull.address), False
        while True:
            if peer is None:
                peer, fresh = _connect(pull.address), True
            try:
                challenge = bytearray(CHALLENGE_BYTES)
                receive(peer, memoryview(challenge), pull.check)
                request = pack_request(pull.key, bytes(challenge), pull.nonce, index, pull.count)
                peer.sendall(request)
                grant = read_grant(peer, pull.check)
                break
            except OSError:
                peer.close()
                if fresh:
                    raise
                peer = None  # An idle connection that the peer has closed: once more, anew.
            except _GivenUp:
                peer.close()
                raise
        problem = grant.error
        try:
            if not problem:
                theirs = [(tuple(shape), dtype) for shape, dtype in grant.leaves]
                ours = [(tuple(spec.shape), str(spec.dtype)) for spec in pull.specs]
                if theirs != ours:
                    raise FrameError(f"published {theirs[:3]}.., asked for {ours[:3]}..")
                receive_parts(peer, pull.views, index, pull.count, pull.check)
        except (OSError, _GivenUp):
            peer.close()
            raise
        self._idle.give_back(pull.address, peer)
        return problem
