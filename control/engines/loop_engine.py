# SPDX-License-Identifier: Apache-2.0
"""What the engines with a loop thread share: one connection to each peer, and the pulls over it.

The methods of an engine may be called on any thread and never wait for a peer. Connections belong
to the loop's thread: the others only post to it, so there is no lock. A pull may end on any thread,
for instance because whoever waits for it gives up; its connection forgets it a little later.
"""

import abc
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import jax
import zmq

from kvferry.control.control_loop import ControlLoop, ControlLoopError
from kvferry.control.engines.base import EngineOptions, Pull, Spec, TransferEngine, TransferError
from kvferry.control.engines.pending import PendingPull
from kvferry.control.engines.publications import (
    Publication,
    Publications,
    check_publishable,
    describe,
    fingerprint,
)
from kvferry.control.workers import WorkerPool

_WORKERS = 2
_MAX_QUEUED = 65536

T = TypeVar("T")
P = TypeVar("P", bound=PendingPull)


class Connection(abc.ABC, Generic[P]):
    """A connection to a process that publishes, and the pulls over it. Loop's thread only.

    Args:
        address: Of the peer.
        on_down: Called once with the address when the connection has ended by itself.

    Attributes:
        open: Whether it has not ended.
        pulls: Those that have not ended, by number.
    """

    def __init__(self, address: str, on_down: Callable[[str], None]) -> None:
        self.open = True
        self.pulls: dict[int, P] = {}
        self._address = address
        self._on_down = on_down

    def start(self, pull: P) -> None:
        """Asks the peer for what a pull wants."""
        self.pulls[pull.number] = pull
        self._ask(pull)

    def forget(self, pull: PendingPull) -> None:
        """Lets go of a pull that was given up; others are ignored."""
        self.pulls.pop(pull.number, None)

    def close(self, reason: str) -> None:
        """Ends the connection; pulls over it fail for that reason. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._shut()
        pulls, self.pulls = list(self.pulls.values()), {}
        for pull in pulls:
            pull.fail(reason)

    def _go_down(self, reason: str) -> None:
        if self.open:
            self.close(reason)
            self._on_down(self._address)

    @abc.abstractmethod
    def _ask(self, pull: P) -> None:
        """Asks for what a pull wants, now or as soon as the peer is ready for it."""

    @abc.abstractmethod
    def _shut(self) -> None:
        """Closes what the connection consists of."""


class LoopEngine(TransferEngine, Generic[T, P]):
    """An engine with a loop thread. T is what a publication is prepared as, P the kind of pulls.

    Args:
        options: See `EngineOptions`.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._loop = ControlLoop(f"kv-{self.engine_name}")
        self._workers = WorkerPool(f"kv-{self.engine_name}-prepare", _WORKERS, _MAX_QUEUED)
        self._publications: Publications[T] = Publications(self._loop, self._workers)
        self._connections: dict[str, Connection[P]] = {}
        self._numbers = itertools.count()
        self._running = False

    @property
    def failure(self) -> str | None:
        """See `TransferEngine.failure`."""
        dead = self._loop.failure
        return None if dead is None else f"its thread died: {dead!r}"

    def settings(self) -> Mapping[str, int | str]:
        """Returns nothing: what must be equal belongs to the protocol."""
        return {}

    def release(self, key: int, *, delivered: bool) -> None:
        """Drops what is published under `key`."""
        self._publications.release(key)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts a pull; see `TransferEngine.pull`."""
        pull = self._new_pull((address, key), specs, deadline_seconds)
        if not self._running or not self._loop.post(functools.partial(self._start_pull, pull)):
            raise TransferError(f"pull {key}: {self._not_running}")
        return pull

    def disconnect(self, address: str) -> None:
        """Closes the connection to a peer; pulls over it fail."""
        self._loop.post(functools.partial(self._drop, address))

    def counters(self) -> dict[str, int]:
        """Returns published keys, and connections to peers. A pull that has ended holds nothing."""
        return {
            "published_keys": len(self._publications),
            "draining_pulls": 0,
            "connections": len(self._connections),
        }

    def close(self) -> None:
        """Closes everything; pulls in progress fail, arrays that were pulled live on."""
        if self._running:
            self._running = False
            self._publications.release_all()
            with contextlib.suppress(ControlLoopError):  # It has died, and dropped all by itself.
                self._loop.call(self._drop_all)
            self._loop.stop()
        self._workers.stop()

    def _run(self) -> None:
        """Begins to work; for `start`, once peers can connect."""
        self._loop.on_failure(self._drop_all)
        self._loop.post(self._publications.start)
        self._workers.start()
        self._running = True

    def _check_publish(self, key: int, arrays: Sequence[jax.Array]) -> None:
        check_publishable(key, arrays)
        if not self._running:
            raise TransferError(f"cannot publish {key}: {self._not_running}")

    def _add(
        self,
        key: int,
        arrays: Sequence[jax.Array],
        seconds: float,
        prepare: Callable[[list[jax.Array]], T],
        discard: Callable[[], None],
        on_end: Callable[[], None] | None = None,
    ) -> Publication[T]:
        """Holds arrays until they are released or expire; see `Publication`."""
        held = list(arrays)
        publication = Publication(
            key=key,
            fingerprint=fingerprint(held),
            text=describe(held),
            until=time.monotonic() + seconds,
            prepare=lambda: prepare(held),
            discard=discard,
            on_end=on_end,
        )
        self._publications.add(publication)
        return publication

    @abc.abstractmethod
    def _new_pull(self, source: tuple[str, int], specs: Sequence[Spec], seconds: float) -> P:
        """Makes a pull from an address and an id, which calls `_forget` when it has failed."""

    @abc.abstractmethod
    def _connect(self, address: str) -> Connection[P]:
        """Makes a connection, which calls `_on_down`. Loop's thread; does not block.

        Raises:
            OSError: If the peer cannot be reached.
            ValueError: If it must not be connected to, or nobody can have that address.
            zmq.ZMQError: If nobody can have that address, or there are no more sockets.
        """

    def _start_pull(self, pull: P) -> None:
        if pull.ended:
            return
        connection = self._connections.get(pull.address)
        if connection is None:
            try:
                connection = self._connect(pull.address)
            except (OSError, ValueError, zmq.ZMQError) as error:
                pull.fail(f"transfer engine {self.engine_name!r} cannot reach it: {error}")
                return
            self._connections[pull.address] = connection
        pull.number = next(self._numbers)
        connection.start(pull)

    def _forget(self, pull: PendingPull) -> None:
        def forget() -> None:
            connection = self._connections.get(pull.address)
            if connection is not None:
                connection.forget(pull)

        self._loop.post(forget)

    def _on_down(self, address: str) -> None:
        self._connections.pop(address, None)

    def _drop(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close("the connection was closed on this side")

    def _drop_all(self) -> None:
        for address in list(self._connections):
            self._drop(address)

    @property
    def _not_running(self) -> str:
        return f"transfer engine {self.engine_name!r} is not running"
