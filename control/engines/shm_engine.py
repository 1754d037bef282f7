# SPDX-License-Identifier: Apache-2.0
"""A transfer engine for two processes on one host: pages are copied once, into shared memory.

The publishing side copies the arrays into a segment, on a thread of its own, and lends the segment
to whoever proves the id. The pulling side maps it, read-only, and on CPU hands that memory to JAX
without another copy; on an accelerator `device_put` copies out of it. shm_segments.py says why no
array ever sees its memory change.

Only processes of the same user under the same kernel get that far; the death of either is noticed
at once by the other, and nothing is left behind.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from kvferry.control.control_loop import ControlLoop, ControlLoopError
from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
)
from kvferry.control.engines.copy_crew import Copy, CopyCrew
from kvferry.control.engines.host_arrays import total_bytes
from kvferry.control.engines.pending import PendingPull
from kvferry.control.engines.publications import (
    Publication,
    Publications,
    as_bytes,
    check_publishable,
    describe,
    fingerprint,
    host_parts,
)
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.engines.shm_peers import ShmSource, ShmTarget
from kvferry.control.engines.shm_segments import Segment, SegmentPool
from kvferry.control.engines.tcp_frames import Bytes, offsets
from kvferry.control.workers import WorkerPool

_CAPACITY_BYTES = 2 << 30
_PIECE_BYTES = 4 << 20
_WORKERS = 2
_MAX_QUEUED = 65536
_TRIM_SECONDS = 10.0
_IDLE_SECONDS = 30.0


@transfer_engine("shm")
class ShmEngine(TransferEngine):
    """Moves arrays within a host. Linux only.

    Args:
        options: Ignored but for being kept: it has no port, and nobody else can reach it.
        capacity_bytes: Shared memory for what is published at a time; one publication is always
            let through.
        eager: Whether arrays are staged when they are published, which frees device memory early,
            or only when they are asked for.
    """

    exposure = ""

    def __init__(
        self, options: EngineOptions, *, capacity_bytes: int = _CAPACITY_BYTES, eager: bool = True
    ) -> None:
        super().__init__(options)
        self._eager = eager
        self._loop = ControlLoop("kv-shm")
        self._workers = WorkerPool("kv-shm-stage", _WORKERS, _MAX_QUEUED)
        self._crew = CopyCrew()
        self._publications: Publications[Segment] = Publications(self._loop, self._workers)
        self._pool = SegmentPool(capacity_bytes, self._on_drop)
        self._source = ShmSource(self._loop, self._publications, self._pool)
        self._targets: dict[str, ShmTarget] = {}
        self._running = False

    @property
    def failure(self) -> str | None:
        """See `TransferEngine.failure`."""
        dead = self._loop.failure
        return None if dead is None else f"its thread died: {dead!r}"

    def start(self) -> str:
        """Begins to listen, where only processes of this host can come.

        Returns:
            The address, new at each start.

        Raises:
            EngineStartError: If this system has no sealed shared memory.
        """
        if sys.platform != "linux":
            raise EngineStartError(
                "transfer engine 'shm' works on Linux only; use --transfer_engine=tcp"
            )
        self._loop.start()
        try:
            probe = Segment(-1, 1)
            probe.open()
            probe.close()
            address = self._loop.call(self._source.open)
        except OSError as error:
            self._loop.stop()
            raise EngineStartError(
                f"transfer engine 'shm' cannot use shared memory here: {error}; it needs Linux 5.1"
            ) from error
        self._loop.on_failure(self._drop_all)
        self._loop.post(self._start_timers)
        self._workers.start()
        self._crew.start()
        self._running = True
        return address

    def settings(self) -> Mapping[str, int | str]:
        """Returns nothing: any two fit that reach each other."""
        return {}

    def has_room(self, specs: Sequence[Spec]) -> bool:
        """Whether so much more shared memory may be published."""
        return self._pool.has_room(total_bytes(specs))

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Has the arrays copied into shared memory, on another thread.

        Args:
            key: One-shot id.
            arrays: What to publish.
            deadline_seconds: After this time it is dropped.

        Raises:
            ValueError: If `key` is published already or an array cannot travel.
            TransferError: If the engine is not running, or there is no room.
        """
        check_publishable(key, arrays)
        if not self._running:
            raise TransferError(f"cannot publish {key}: transfer engine 'shm' is not running")
        held = list(arrays)
        sizes = [each.size * each.dtype.itemsize for each in held]
        segment = self._pool.reserve(offsets(sizes)[1])
        if segment is None:
            raise TransferError(
                f"cannot publish {key}: {sum(sizes)} bytes more than the shared memory that may be"
                " published at a time; release something first"
            )
        publication = Publication(
            key=key,
            fingerprint=fingerprint(held),
            text=describe(held),
            until=time.monotonic() + deadline_seconds,
            prepare=lambda: self._stage(held, segment),
            discard=lambda: self._pool.unpublish(segment),
            on_end=lambda: self._pool.leave(segment),
        )
        try:
            self._publications.add(publication)
        except ValueError:
            self._pool.unpublish(segment)
            raise
        if self._eager:
            self._publications.prepare(publication)

    def release(self, key: int, *, delivered: bool) -> None:
        """Ends a publication. Its segment is used again once the puller's arrays are gone too."""
        self._publications.release(key)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts a pull; see `TransferEngine.pull`."""
        pull = PendingPull((address, key), specs, deadline_seconds, self._forget)
        if not self._running or not self._loop.post(lambda: self._start_pull(pull)):
            raise TransferError(f"pull {key}: transfer engine 'shm' is not running")
        return pull

    def disconnect(self, address: str) -> None:
        """Closes the connection to a peer; pulls over it fail. Arrays that live are not harmed."""
        self._loop.post(lambda: self._drop(address))

    def counters(self) -> dict[str, int]:
        """Returns published keys, connections, and what there is of shared memory."""
        return {
            "published_keys": len(self._publications),
            "draining_pulls": 0,
            "connections": len(self._targets),
            **self._pool.counters(),
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
        self._crew.stop()
        self._pool.close()

    def _stage(self, arrays: Sequence[jax.Array], segment: Segment) -> Segment:
        # On a staging thread. All arrays are computed before the first byte is copied.
        self._crew.run(list(_copies(arrays, segment.open())))
        return segment

    def _start_timers(self) -> None:
        self._publications.start()
        self._loop.every(_TRIM_SECONDS, lambda: self._pool.trim(_IDLE_SECONDS))

    def _start_pull(self, pull: PendingPull) -> None:
        if pull.ended:
            return
        target = self._targets.get(pull.address)
        if target is None:
            try:
                target = ShmTarget(self._loop, pull.address, self._on_down)
            except OSError as error:
                pull.fail(f"cannot reach that process on this host: {error}")
                return
            self._targets[pull.address] = target
        target.start(pull)

    def _forget(self, pull: PendingPull) -> None:
        def forget() -> None:
            target = self._targets.get(pull.address)
            # By identity: another connection to the peer may have given out the same number.
            if target is not None and target.pulls.get(pull.number) is pull:
                del target.pulls[pull.number]

        self._loop.post(forget)

    def _on_down(self, target: ShmTarget) -> None:
        if self._targets.get(target.address) is target:
            del self._targets[target.address]

    def _drop(self, address: str) -> None:
        target = self._targets.pop(address, None)
        if target is not None:
            target.close("the connection was closed on this side")

    def _drop_all(self) -> None:
        self._source.close()
        for address in list(self._targets):
            self._drop(address)

    def _on_drop(self, segment: Segment) -> None:
        if not self._loop.post(functools.partial(self._source.forget, segment)):
            segment.close()


def _copies(arrays: Sequence[jax.Array], memory: Bytes) -> Iterator[Copy]:
    """Yields what has to be copied for arrays to be as `host_arrays.arrays_in` finds them."""
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    for array, start, size in zip(arrays, offsets(sizes)[0], sizes, strict=True):
        place = memory[start : start + size]
        for index, part in host_parts(array):
            if index is not None:
                whole = place.view(array.dtype).reshape(array.shape)
                yield functools.partial(whole.__setitem__, index, part)
                continue
            source = as_bytes(part)
            for low in range(0, size, _PIECE_BYTES):
                piece = slice(low, low + _PIECE_BYTES)
                yield functools.partial(np.copyto, place[piece], source[piece])
