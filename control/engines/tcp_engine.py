# SPDX-License-Identifier: Apache-2.0
"""A transfer engine on plain TCP: parallel streams straight into the memory of the arrays.

On CPU it is faster than `jax.experimental.transfer`, because a byte is copied twice and not four
times, and into memory that was in use before; and a peer that stops to read blocks nobody else.
Errors travel in band, so a pull that cannot succeed ends at once.
"""

import collections
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import jax

from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
)
from kvferry.control.engines.frames import (
    CHALLENGE_BYTES,
    Grant,
    pack_request,
    read_grant,
    receive,
    receive_part,
    set_timeouts,
)
from kvferry.control.engines.publications import check_publishable
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.engines.tcp_buffers import BufferPool
from kvferry.control.engines.tcp_pull import GivenUp, TcpPull
from kvferry.control.engines.tcp_server import TcpServer
from kvferry.control.security import PortInUseError, check_advertise, host_port, listen_error
from kvferry.control.workers import WorkerPool

_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_POOLS_PER_CHANNEL = 4
_MAX_QUEUED = 65536


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


@transfer_engine("tcp")
class TcpEngine(TransferEngine):
    """Moves arrays over TCP.

    Args:
        options: `host` must be numeric and not a wildcard. `channels` is the largest number
            of streams of one pull; the two ends need not agree on it.
    """

    exposure = (
        "a stream has to prove a live transfer id, but KV pages, and with them the prompts, travel"
        " unencrypted."
    )

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._server: TcpServer | None = None
        self._idle = _Connections()
        self._num_workers = options.channels * _POOLS_PER_CHANNEL
        self._workers = WorkerPool("kv-tcp-pull", self._num_workers, _MAX_QUEUED)
        self._buffers = BufferPool()
        self._pulls: set[TcpPull] = set()
        self._lock = threading.Lock()

    @property
    def failure(self) -> str | None:
        """See `TransferEngine.failure`."""
        return self._server.failure if self._server is not None else None

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
            problem = listen_error(host, port, error)
            if isinstance(problem, PortInUseError):
                raise problem from error
            raise EngineStartError(f"transfer engine 'tcp' {problem}") from error
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
        check_publishable(key, arrays)
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
            TransferError: If the engine is not running or there is no memory for the arrays.
        """
        if self._server is None:
            raise TransferError(f"pull {key}: transfer engine 'tcp' is not running")
        pull = TcpPull((address, key), specs, self.options.channels, deadline_seconds)
        # First of all: while the peer gets ready, memory and arrays are made.
        early = [self._ask_early(pull, index) for index in range(pull.count)]
        try:
            pull.memory = self._buffers.lend(pull.num_bytes)
        except OSError as error:
            for peer in filter(None, early):
                peer.close()
            raise TransferError(
                f"pull {key}: no memory for {pull.num_bytes} bytes: {error}"
            ) from error
        with self._lock:
            self._pulls.add(pull)
        for index, asked in enumerate(early):
            if asked is not None and pull.count == 1:
                pull.read_here(asked, self._end_here)
            else:
                self._submit(pull, index, asked)
        pull.make_early()
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
        with self._lock:
            self._pulls.clear()  # Streams that no thread had begun were dropped with their jobs.
        if self._server is not None:
            self._server.close()
            self._server = None
        self._idle.drop_all()
        self._buffers.close()

    def _ask_early(self, pull: TcpPull, index: int) -> socket.socket | None:
        """Asks for a stream on an idle connection, so that it comes while a thread wakes up.

        Not if all threads are busy: the other end would then wait long for its bytes to be read.
        """
        if self._workers.pending >= self._num_workers:
            return None
        peer = self._idle.take(pull.address)
        if peer is None:
            return None
        try:
            # The challenge is there already, unless the peer has closed the connection.
            challenge = peer.recv(CHALLENGE_BYTES, socket.MSG_DONTWAIT)
            if len(challenge) == CHALLENGE_BYTES:
                _ask(peer, pull, index, challenge)
                return peer
        except OSError:
            pass  # Anew then, by the thread.
        peer.close()
        return None

    def _submit(self, pull: TcpPull, index: int, asked: socket.socket | None) -> None:
        job = self._stream_job(pull, index, asked)
        if not self._workers.submit(job, lambda error: self._end(pull, repr(error))):
            if asked is not None:
                asked.close()
            self._end(pull, "too many pulls wait")

    def _end_here(self, pull: TcpPull, peer: socket.socket, problem: str | None) -> None:
        """Takes a pull back from the thread that waits for it.

        Args:
            pull: The pull.
            peer: Its connection, closed if it cannot be used again.
            problem: What was wrong, or an empty text; None if the connection was stale.
        """
        if problem is None and not pull.ended:
            self._submit(pull, 0, None)
            return
        if peer.fileno() >= 0:
            self._idle.give_back(pull.address, peer)
        self._end(pull, "given up" if problem is None else problem)

    def _stream_job(
        self, pull: TcpPull, index: int, asked: socket.socket | None
    ) -> Callable[[], None]:
        def job() -> None:
            try:
                problem = self._stream(pull, index, asked)
            except GivenUp:
                problem = "given up"
            except (OSError, ValueError) as error:
                problem = str(error)
            self._end(pull, problem)

        return job

    def _end(self, pull: TcpPull, problem: str) -> None:
        pull.finish_stream(problem)
        if pull.running == 0:
            with self._lock:
                self._pulls.discard(pull)

    def _stream(self, pull: TcpPull, index: int, asked: socket.socket | None) -> str:
        """Receives one stream; returns what was wrong, or an empty text."""
        peer, grant = _granted(pull, index, asked)
        problem = grant.error
        try:
            if not problem:
                pull.check_grant(grant)
                receive_part(peer, pull.memory, index, pull.count, pull.check)
        except (OSError, GivenUp):
            peer.close()
            raise
        self._idle.give_back(pull.address, peer)
        return problem


def _ask(peer: socket.socket, pull: TcpPull, index: int, challenge: bytes) -> None:
    peer.sendall(pack_request(pull.key, challenge, pull.nonce, index, pull.count))


def _granted(pull: TcpPull, index: int, asked: socket.socket | None) -> tuple[socket.socket, Grant]:
    """Returns a connection and the answer that came on it to the request for a stream."""
    peer = asked
    while True:
        fresh = peer is None
        peer = peer or _connect(pull.address)
        try:
            pull.check()
            if fresh:
                challenge = bytearray(CHALLENGE_BYTES)
                receive(peer, memoryview(challenge), pull.check)
                _ask(peer, pull, index, bytes(challenge))
            return peer, read_grant(peer, pull.check)
        except OSError:
            peer.close()
            if fresh:
                raise
            peer = None  # An idle connection that the peer has closed: once more, anew.
        except GivenUp:
            peer.close()
            raise
