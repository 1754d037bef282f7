# SPDX-License-Identifier: Apache-2.0
"""Puts pinned host memory between a prefill server's pages and any transfer engine.

What is published is copied into a slot of a `HostKVPool` first, and it is the slot that travels:
the gathered copy in device memory is free as soon as the copy is done, however long the decode
server takes to pull. The slots are allocated at the start; when all are on loan, `publish` says so
and the caller waits for a release, as it does for any other back-pressure.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence

import jax

from kvferry.control.engines.base import Pull, Spec, TransferEngine, TransferError, sharding_of
from kvferry.control.host_kv_pool import HostKVPool, HostSlot
from kvferry.kernels.copy_to_host import copy_to_host

_MEMORY_KIND = "pinned_host"
_Key = tuple[tuple[tuple[int, ...], str], ...]


class StagingEngine(TransferEngine):
    """An engine that stages page arrays in host memory and leaves the rest to another engine.

    Arrays that are no pages (the control layer's canaries) are published as they are.
    """

    def __init__(
        self, engine: TransferEngine, page_specs: Sequence[Sequence[Spec]], num_slots: int
    ) -> None:
        """Wraps an engine; allocates nothing before `start`.

        Args:
            engine: Carries the slots to the peer.
            page_specs: Each set of arrays that is to be staged, with shardings.
            num_slots: Slots for each of these sets.
        """
        super().__init__(engine.options)
        self.engine_name = engine.engine_name
        self.exposure = engine.exposure
        self._engine = engine
        self._page_specs = [list(specs) for specs in page_specs]
        self._num_slots = num_slots
        self._pools: dict[_Key, HostKVPool] = {}
        self._slots: dict[int, HostSlot] = {}
        self._lock = threading.Lock()

    @property
    def smallest_pages(self) -> list[Spec]:
        """The smallest set of arrays that is staged."""
        return min(self._page_specs, key=lambda specs: sum(spec.size for spec in specs))

    @property
    def failure(self) -> str | None:
        """See `TransferEngine.failure`."""
        return self._engine.failure

    def start(self) -> str:
        """Allocates the slots, compiles the copies, and starts the engine below."""
        for specs in self._page_specs:
            pool = HostKVPool([_on_host(spec) for spec in specs], self._num_slots)
            self._pools[_key(specs)] = pool
            slot = pool.try_lease()
            assert slot is not None
            with slot:
                _stage([_empty(spec) for spec in specs], slot)
        return self._engine.start()

    def settings(self) -> Mapping[str, int | str]:
        """See `TransferEngine.settings`; staging concerns one side only."""
        return self._engine.settings()

    def versions(self) -> Mapping[str, str]:
        """See `TransferEngine.versions`."""
        return self._engine.versions()

    def has_room(self, specs: Sequence[Spec]) -> bool:
        """Whether a slot of this size is free."""
        pool = self._pools.get(_key(specs))
        return pool is None or pool.num_free > 0

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Stages page arrays and publishes the slot; see `TransferEngine.publish`.

        Raises:
            TransferError: All slots of this size are on loan; see `has_room`.
        """
        pool = self._pools.get(_key(arrays))
        if pool is None:
            self._engine.publish(key, arrays, deadline_seconds)
            return
        slot = pool.try_lease()
        if slot is None:
            raise TransferError(f"all {pool.num_slots} host slots of this size are on loan")
        with contextlib.ExitStack() as undo:
            undo.callback(slot.release)
            _stage(arrays, slot)
            self._engine.publish(key, slot.arrays, deadline_seconds)
            undo.pop_all()
        with self._lock:
            self._slots[key] = slot

    def release(self, key: int, *, delivered: bool) -> None:
        """Lets go of what was published, and of its slot."""
        self._engine.release(key, delivered=delivered)
        self._give_back(key)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """See `TransferEngine.pull`."""
        return self._engine.pull(address, key, specs, deadline_seconds)

    def disconnect(self, address: str) -> None:
        """See `TransferEngine.disconnect`."""
        self._engine.disconnect(address)

    def counters(self) -> dict[str, int]:
        """Adds the slots to what the engine below counts."""
        pools = list(self._pools.values())
        slots = {
            "host_slots": sum(pool.num_slots for pool in pools),
            "host_slots_leased": sum(pool.num_leased for pool in pools),
        }
        return {**self._engine.counters(), **slots}

    def close(self) -> None:
        """Closes the engine below, then takes every slot back."""
        self._engine.close()
        for key in list(self._slots):
            self._give_back(key)

    def _give_back(self, key: int) -> None:
        with self._lock:
            slot = self._slots.pop(key, None)
        if slot is not None:
            slot.release()


def _key(arrays: Sequence[jax.Array] | Sequence[Spec]) -> _Key:
    return tuple((tuple(array.shape), str(array.dtype)) for array in arrays)


def _stage(arrays: Sequence[jax.Array], slot: HostSlot) -> None:
    held = slot.arrays
    try:
        for layer, source in enumerate(arrays):
            held[layer] = copy_to_host(source, held[layer])
    finally:
        # Each copy donates what it overwrites: the slot stays whole even if a later one fails.
        slot.update(held)


def _on_host(spec: Spec) -> Spec:
    host = sharding_of(spec).with_memory_kind(_MEMORY_KIND)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=host)


def _empty(spec: Spec) -> jax.Array:
    make = jax.jit(lambda: jax.numpy.zeros(spec.shape, spec.dtype), out_shardings=spec.sharding)
    return make()
