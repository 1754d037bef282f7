# SPDX-License-Identifier: Apache-2.0
"""What a bootstrap server knows: prefill instances with their leases, and who holds which room."""

import collections
import dataclasses
import math
from collections.abc import Callable

from kvferry.control.messages import Instance

_MAX_INSTANCES = 4096
_MAX_ROOMS_PER_INSTANCE = 65536


@dataclasses.dataclass
class _Entry:
    instance: Instance
    lease_until: float
    # In order of announcement, so that the oldest goes first when there are too many.
    rooms: collections.OrderedDict[int, None]


class InstanceRegistry:
    """Instances and rooms, with leases. Not locked; cost per room does not grow with their number.

    Args:
        lease_seconds: Time after the last heartbeat at which an instance is dropped. Positive.
        clock: Returns the time in seconds.
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        # In the order in which their leases end, as all leases are of the same length.
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()
        self._by_address: dict[tuple[str, int], str] = {}
        self._room_holder: dict[int, str] = {}

    @property
    def num_instances(self) -> int:
        """Registered instances."""
        return len(self._entries)

    @property
    def num_rooms(self) -> int:
        """Announced rooms."""
        return len(self._room_holder)

    @property
    def next_expiry_seconds(self) -> float:
        """Time until the next lease is over, if it is not renewed; infinite without instances."""
        if not self._entries:
            return math.inf
        return next(iter(self._entries.values())).lease_until - self._clock()

    def register(self, instance: Instance) -> str | None:
        """Adds an instance, or renews it. It replaces an older one at the same address at once.

        Args:
            instance: A prefill instance.

        Returns:
            Why it is refused, or None.
        """
        if instance.role != "prefill":
            return f"only prefill servers register here, not a {instance.role} server"
        address = _address(instance)
        holder = self._by_address.get(address)
        if holder is not None and holder != instance.instance_id:
            if self._entries[holder].instance.generation > instance.generation:
                return f"a newer process has registered at {address[0]}:{address[1]}"
            self._drop(holder)
        if instance.instance_id not in self._entries and len(self._entries) >= _MAX_INSTANCES:
            return f"there are {_MAX_INSTANCES} prefill servers already"
        entry = self._entries.get(instance.instance_id)
        rooms = entry.rooms if entry is not None else collections.OrderedDict()
        if entry is not None:
            self._by_address.pop(_address(entry.instance), None)
        self._entries[instance.instance_id] = _Entry(instance, self._lease(), rooms)
        self._entries.move_to_end(instance.instance_id)
        self._by_address[address] = instance.instance_id
        return None

    def heartbeat(self, instance_id: str, generation: int) -> bool:
        """Renews a lease.

        Returns:
            Whether the instance is known; if not, it has to register again.
        """
        entry = self._entry(instance_id, generation)
        if entry is None:
            return False
        entry.lease_until = self._lease()
        self._entries.move_to_end(instance_id)
        return True

    def withdraw(self, instance_id: str, generation: int) -> bool:
        """Drops an instance at its own wish.

        Returns:
            Whether it was known.
        """
        if self._entry(instance_id, generation) is None:
            return False
        self._drop(instance_id)
        return True

    def announce(self, instance_id: str, rooms: list[int]) -> bool:
        """Records that an instance holds rooms.

        Returns:
            Whether the instance is known.
        """
        entry = self._entries.get(instance_id)
        if entry is None:
            return False
        for room in rooms:
            previous = self._room_holder.get(room)
            if previous is not None:
                self._entries[previous].rooms.pop(room, None)
            self._room_holder[room] = instance_id
            entry.rooms[room] = None
        while len(entry.rooms) > _MAX_ROOMS_PER_INSTANCE:
            oldest, _ = entry.rooms.popitem(last=False)
            del self._room_holder[oldest]
        return True

    def retract(self, instance_id: str, rooms: list[int]) -> None:
        """Forgets rooms, as far as this instance holds them."""
        entry = self._entries.get(instance_id)
        for room in rooms:
            if entry is not None and self._room_holder.get(room) == instance_id:
                del self._room_holder[room]
                entry.rooms.pop(room, None)

    def find(
        self, room: int, instance_id: str | None = None, *, only: bool = True
    ) -> Instance | None:
        """Returns the instance for a room.

        Args:
            room: The room.
            instance_id: If given, that instance is meant, whatever was announced.
            only: Whether the only instance there is stands for rooms that nobody announced.

        Returns:
            The instance that announced the room; else, with `only`, the only instance; else None.
        """
        wanted = instance_id or self._room_holder.get(room)
        if wanted is None and only and len(self._entries) == 1:
            wanted = next(iter(self._entries))
        entry = self._entries.get(wanted) if wanted is not None else None
        return entry.instance if entry is not None else None

    def expire(self) -> list[Instance]:
        """Drops the instances whose lease is over, and returns them."""
        over: list[Instance] = []
        while self._entries and self.next_expiry_seconds <= 0:
            over.append(next(iter(self._entries.values())).instance)
            self._drop(over[-1].instance_id)
        return over

    def _lease(self) -> float:
        return self._clock() + self.lease_seconds

    def _entry(self, instance_id: str, generation: int) -> _Entry | None:
        entry = self._entries.get(instance_id)
        if entry is None or entry.instance.generation != generation:
            return None
        return entry

    def _drop(self, instance_id: str) -> None:
        entry = self._entries.pop(instance_id)
        self._by_address.pop(_address(entry.instance), None)
        for room in entry.rooms:
            del self._room_holder[room]


def _address(instance: Instance) -> tuple[str, int]:
    return instance.host, instance.side_channel_port
