# SPDX-License-Identifier: Apache-2.0
"""A transfer engine for two processes on one host: pages are copied once, into shared memory.

The publishing side copies the arrays into a segment, on a thread of its own, and lends the segment
to whoever proves the id. The pulling side maps it, read-only, and on CPU hands that memory to JAX
without another copy; on an accelerator `device_put` copies out of it. shm_segments.py says why no
array ever sees its memory change.

Only processes of the same user under the same kernel get that far; the death of either is noticed
at once by the other, and nothing is left behind.
"""

import functools
import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from kvferry.control.engines.base import EngineOptions, EngineStartError, Spec, TransferError
from kvferry.control.engines.copy_crew import Copy, CopyCrew
from kvferry.control.engines.frames import Bytes, offsets
from kvferry.control.engines.host_arrays import as_bytes, host_parts, sizes_of, total_bytes
from kvferry.control.engines.loop_engine import LoopEngine
from kvferry.control.engines.pending import PendingPull
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.engines.shm_peers import ShmSource, ShmTarget
from kvferry.control.engines.shm_segments import Segment, SegmentPool

_CAPACITY_BYTES = 2 << 30
_PIECE_BYTES = 4 << 20
_TRIM_SECONDS = 10.0
_IDLE_SECONDS = 30.0


@transfer_engine("shm")
class ShmEngine(LoopEngine[Segment, PendingPull]):
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
        self._crew = CopyCrew()
        self._pool = SegmentPool(capacity_bytes, self._on_drop)
        self._source = ShmSource(self._loop, self._publications, self._pool)

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
        self._loop.post(self._start_trimming)
        self._crew.start()
        self._run()
        return address

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
        self._check_publish(key, arrays)
        segment = self._pool.reserve(total_bytes(arrays))
        if segment is None:
            raise TransferError(
                f"cannot publish {key}: {sum(sizes_of(arrays))} bytes more than the shared memory"
                " that may be published at a time; release something first"
            )
        try:
            publication = self._add(
                key,
                arrays,
                deadline_seconds,
                lambda held: self._stage(held, segment),
                lambda: self._pool.unpublish(segment),
                lambda: self._pool.leave(segment),
            )
        except ValueError:
            self._pool.unpublish(segment)
            raise
        if self._eager:
            self._publications.prepare(publication)

    def counters(self) -> dict[str, int]:
        """Adds what there is of shared memory to what `LoopEngine` counts."""
        return {**super().counters(), **self._pool.counters()}

    def close(self) -> None:
        """See `LoopEngine.close`."""
        super().close()
        self._crew.stop()
        self._pool.close()

    def _stage(self, arrays: Sequence[jax.Array], segment: Segment) -> Segment:
        # On a staging thread. All arrays are computed before the first byte is copied.
        self._crew.run(list(_copies(arrays, segment.open())))
        return segment

    def _start_trimming(self) -> None:
        self._loop.every(_TRIM_SECONDS, lambda: self._pool.trim(_IDLE_SECONDS))

    def _new_pull(
        self, source: tuple[str, int], specs: Sequence[Spec], seconds: float
    ) -> PendingPull:
        return PendingPull(source, specs, seconds, self._forget)

    def _connect(self, address: str) -> ShmTarget:
        return ShmTarget(self._loop, address, self._on_down)

    def _drop_all(self) -> None:
        self._source.close()
        super()._drop_all()

    def _on_drop(self, segment: Segment) -> None:
        if not self._loop.post(functools.partial(self._source.forget, segment)):
            segment.close()


def _copies(arrays: Sequence[jax.Array], memory: Bytes) -> Iterator[Copy]:
    """Yields what has to be copied for arrays to be as `host_arrays.arrays_in` finds them."""
    sizes = sizes_of(arrays)
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
