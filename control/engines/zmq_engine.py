# SPDX-License-Identifier: Apache-2.0
"""A transfer engine on ZMQ, for its simplicity: the only one whose pages can travel under CURVE.

The pulling side asks for pieces of a publication, a few ahead of what it has, and puts them into
one block of host memory that becomes the arrays. So what is under way is bounded, whoever stops to
read harms only himself, and whoever gives up simply asks no more. The id is the capability: it is
in every request, and without keys the sockets stay on loopback.

One thread owns all sockets.
"""

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence

import jax
import zmq

from kvferry.control.control_loop import ControlLoop, ControlLoopError
from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
)
from kvferry.control.engines.host_arrays import total_bytes
from kvferry.control.engines.pending import PendingPull
from kvferry.control.engines.publications import (
    Publication,
    Publications,
    as_bytes,
    check_publishable,
    describe,
    fingerprint,
)
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.engines.tcp_buffers import BufferPool
from kvferry.control.engines.tcp_frames import Bytes
from kvferry.control.engines.zmq_peers import ZmqPull, ZmqSource, ZmqTarget
from kvferry.control.security import PortInUseError, check_advertise, check_bind, host_port
from kvferry.control.workers import WorkerPool

_WORKERS = 2
_MAX_QUEUED = 65536


@transfer_engine("zmq")
class ZmqEngine(TransferEngine):
    """Moves arrays over ZMQ.

    Args:
        options: `host` must be numeric and not a wildcard, and loopback if there are no `keys`.
    """

    exposure = ""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._loop = ControlLoop("kv-zmq")
        self._workers = WorkerPool("kv-zmq-fetch", _WORKERS, _MAX_QUEUED)
        self._publications: Publications[list[Bytes]] = Publications(self._loop, self._workers)
        self._source = ZmqSource(self._loop, self._publications, options.keys)
        self._targets: dict[str, ZmqTarget] = {}
        self._buffers = BufferPool()
        self._running = False

    @property
    def failure(self) -> str | None:
        """See `TransferEngine.failure`."""
        dead = self._loop.failure
        return None if dead is None else f"its thread died: {dead!r}"

    def start(self) -> str:
        """Listens.

        Returns:
            The address, "ip:port".

        Raises:
            PortInUseError: If the port is taken.
            EngineStartError: If the address is a wildcard, not numeric, not of this machine, or
                not loopback and there are no keys.
        """
        host, port = self.options.host, self.options.port
        try:
            check_advertise(host)
            check_bind(host, self.options.keys)
            self._loop.start()
            port = self._loop.call(functools.partial(self._source.open, host, port))
        except ValueError as error:
            raise EngineStartError(f"transfer engine 'zmq' cannot start: {error}") from error
        except zmq.ZMQError as error:
            self._loop.stop()
            where = host_port(host, port)
            if error.errno == zmq.EADDRINUSE:
                raise PortInUseError(f"port {where} is taken by another process") from error
            raise EngineStartError(
                f"transfer engine 'zmq' cannot listen on {where}: {error}"
            ) from error
        self._loop.on_failure(self._drop_all)
        self._loop.post(self._publications.start)
        self._workers.start()
        self._running = True
        return host_port(host, port)

    def settings(self) -> Mapping[str, int | str]:
        """Returns nothing: the size of a piece belongs to the protocol."""
        return {}

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Keeps the arrays until they are pulled and released; see `TransferEngine.publish`."""
        check_publishable(key, arrays)
        if not self._running:
            raise TransferError(f"cannot publish {key}: transfer engine 'zmq' is not running")
        held = list(arrays)
        self._publications.add(
            Publication(
                key=key,
                fingerprint=fingerprint(held),
                text=describe(held),
                until=time.monotonic() + deadline_seconds,
                prepare=lambda: [as_bytes(each) for each in jax.device_get(held)],
                discard=lambda: self._source.forget(key),
            )
        )

    def release(self, key: int, *, delivered: bool) -> None:
        """Drops what is published under `key`."""
        self._publications.release(key)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts a pull; see `TransferEngine.pull`."""
        memory = self._buffers.lend(total_bytes(specs))
        pull = ZmqPull((address, key), specs, deadline_seconds, self._forget, memory)
        if not self._running or not self._loop.post(lambda: self._start_pull(pull)):
            raise TransferError(f"pull {key}: transfer engine 'zmq' is not running")
        return pull

    def disconnect(self, address: str) -> None:
        """Closes the connection to a peer; pulls over it fail."""
        self._loop.post(lambda: self._drop(address))

    def counters(self) -> dict[str, int]:
        """Returns published keys, and connections to peers. A pull that has ended holds nothing."""
        return {
            "published_keys": len(self._publications),
            "draining_pulls": 0,
            "connections": len(self._targets),
        }

    def close(self) -> None:
        """Closes everything; pulls in progress fail."""
        if self._running:
            self._running = False
            self._publications.release_all()
            with contextlib.suppress(ControlLoopError):  # It has died, and dropped all by itself.
                self._loop.call(self._drop_all)
            self._loop.stop()
        self._workers.stop()
        self._buffers.close()

    def _start_pull(self, pull: ZmqPull) -> None:
        if pull.ended:
            return
        target = self._targets.get(pull.address)
        if target is None:
            try:
                target = ZmqTarget(self._loop, pull.address, self.options.keys, self._on_down)
            except zmq.ZMQError as error:
                pull.fail(f"cannot connect: {error}")
                return
            self._targets[pull.address] = target
        target.start(pull)

    def _forget(self, pull: PendingPull) -> None:
        def forget() -> None:
            target = self._targets.get(pull.address)
            # By identity: another connection to the peer may have given out the same number.
            if target is None or target.pulls.get(pull.number) is not pull:
                return
            del target.pulls[pull.number]
            if not target.pulls:
                # Given up: if the peer hangs, the next pull must not wait behind this one.
                self._drop(pull.address)

        self._loop.post(forget)

    def _on_down(self, target: ZmqTarget) -> None:
        if self._targets.get(target.address) is target:
            del self._targets[target.address]

    def _drop(self, address: str) -> None:
        target = self._targets.pop(address, None)
        if target is not None:
            target.close("the connection was closed on this side")

    def _drop_all(self) -> None:
        for address in list(self._targets):
            self._drop(address)
