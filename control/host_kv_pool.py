# SPDX-License-Identifier: Apache-2.0
"""Pre-allocated host memory for staged KV pages. Usable without the rest of kvferry.

A slot is a list of arrays, one per layer, in host memory. A kernel that copies pages to the host
donates a slot's arrays and returns new ones in the same memory; `HostSlot.update` takes those.
"""

import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Spec = jax.ShapeDtypeStruct


class HostSlot:
    """A slot on loan; made by `HostKVPool.try_lease`, also usable in a `with` statement.

    Attributes:
        index: Which slot of the pool it is.
    """

    def __init__(self, pool: "HostKVPool", index: int, arrays: Sequence[jax.Array]) -> None:
        self.index = index
        self._pool = pool
        self._arrays = list(arrays)
        self._released = False

    @property
    def arrays(self) -> list[jax.Array]:
        """The slot's arrays, one per spec of the pool, in that order.

        Raises:
            RuntimeError: If the slot was released.
        """
        self._check()
        return list(self._arrays)

    def update(self, arrays: Sequence[jax.Array]) -> None:
        """Replaces the arrays by those that an operation returned which had them donated.

        Args:
            arrays: One per spec of the pool, same shapes and dtypes.

        Raises:
            RuntimeError: If the slot was released.
            ValueError: If number, shape or dtype differ; names the first difference.
        """
        self._check()
        found = [(tuple(array.shape), str(array.dtype)) for array in arrays]
        wanted = [(tuple(spec.shape), str(spec.dtype)) for spec in self._pool.specs]
        if len(found) != len(wanted):
            raise ValueError(f"slot {self.index} holds {len(wanted)} arrays, got {len(found)}")
        for position, (theirs, ours) in enumerate(zip(found, wanted, strict=True)):
            if theirs != ours:
                raise ValueError(
                    f"slot {self.index}: array {position} must be {ours[1]}{list(ours[0])}, got"
                    f" {theirs[1]}{list(theirs[0])}"
                )
        self._arrays = list(arrays)

    def release(self) -> None:
        """Returns the slot to its pool.

        Raises:
            RuntimeError: If it was released before.
        """
        self._check()
        self._released = True
        self._pool.take_back(self.index, self._arrays)
        self._arrays = []

    def __enter__(self) -> "HostSlot":
        return self

    def __exit__(self, *unused: object) -> None:
        if not self._released:
            self.release()

    def _check(self) -> None:
        if self._released:
            raise RuntimeError(f"host slot {self.index} was released before")


class HostKVPool:
    """A fixed number of slots in host memory. Thread-safe.

    Args:
        specs: Shape, dtype and sharding (with its memory kind) of each array of a slot.
        num_slots: Number of slots, at least 1; all are allocated here.
        allocate: Makes one array; by default zeros with the spec's sharding.

    Raises:
        ValueError: If `num_slots` is less than 1 or there are no specs.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        num_slots: int,
        *,
        allocate: Callable[[Spec], jax.Array] | None = None,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"a host pool needs at least one slot, got {num_slots}")
        if not specs:
            raise ValueError("a host pool needs at least one array per slot, got no specs")
        self.specs = tuple(specs)
        self.num_slots = num_slots
        self._lock = threading.Lock()
        make = allocate or _zeros
        self._free = {
            index: [make(spec) for spec in self.specs] for index in reversed(range(num_slots))
        }
        self._num_refused = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(spec.size * spec.dtype.itemsize for spec in self.specs)

    @property
    def num_free(self) -> int:
        """Slots that can be leased now."""
        return len(self._free)

    @property
    def num_leased(self) -> int:
        """Slots that are on loan."""
        return self.num_slots - len(self._free)

    def try_lease(self) -> HostSlot | None:
        """Lends a slot. Its content is whatever was there before.

        Returns:
            The slot, or None if all are on loan: an ordinary state that calls for waiting.
        """
        with self._lock:
            if not self._free:
                self._num_refused += 1
                return None
            index, arrays = self._free.popitem()
        return HostSlot(self, index, arrays)

    def take_back(self, index: int, arrays: Sequence[jax.Array]) -> None:
        """Takes a slot back; called by `HostSlot.release`.

        Args:
            index: Which slot.
            arrays: Its arrays.

        Raises:
            RuntimeError: If the slot is not on loan.
        """
        with self._lock:
            if index in self._free:
                raise RuntimeError(f"host slot {index} is not on loan")
            self._free[index] = list(arrays)

    def counters(self) -> dict[str, int]:
        """Returns slots in all, slots on loan, and how often none was left."""
        with self._lock:
            return {
                "host_slots": self.num_slots,
                "host_slots_leased": self.num_slots - len(self._free),
                "host_slots_refused": self._num_refused,
            }


def _zeros(spec: Spec) -> jax.Array:
    make = jax.jit(lambda: jnp.zeros(spec.shape, spec.dtype), out_shardings=spec.sharding)
    return make()
