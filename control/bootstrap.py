# SPDX-License-Identifier: Apache-2.0
"""The bootstrap server: prefill servers register, decode servers ask which one holds a room.

Rooms are announced because several prefill servers may register with one bootstrap server: the one
that the router chose is the one that must be found. With a single prefill server the answer does
not wait for the announcement.

The server keeps nothing on disk. After a restart it is empty, its clients notice by its answer to
the next heartbeat, and register again; look-ups wait that long before they are answered "none".
"""

import collections
import dataclasses

from absl import logging

from kvferry.control.connection import KVBootstrapServer
from kvferry.control.control_loop import ControlLoop, Timer
from kvferry.control.messages import (
    Announce,
    Heartbeat,
    HeartbeatAck,
    Instance,
    Lookup,
    LookupReply,
    Message,
    Refused,
    Register,
    Registered,
    Retract,
    Withdraw,
)
from kvferry.control.room_registry import InstanceRegistry
from kvferry.control.security import host_port
from kvferry.control.side_channel import ChannelOptions, ServerChannel
from kvferry.control.tally import Tally

_MAX_PARKED = 65536
_PARK_SECONDS = 30.0
_LEAST_WAIT_SECONDS = 0.005


@dataclasses.dataclass(frozen=True, eq=False)
class _Parked:
    peer: bytes
    query: int
    room: int
    until: float


class ZmqBootstrapServer(KVBootstrapServer):
    """A bootstrap server on a ZMQ ROUTER socket.

    Args:
        host: Numeric address to listen on.
        port: Port to listen on; 0 takes any free one.
        options: Timeouts and keys. The lease of an instance is the peer timeout.
        loop: The control loop to run on; by default one of its own.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        options: ChannelOptions | None = None,
        loop: ControlLoop | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._options = options or ChannelOptions()
        self._own_loop = loop is None
        self._loop = loop or ControlLoop("kv-bootstrap")
        self._tally = Tally()
        # A lease does not run out while this process is stopped: the heartbeats of that time are
        # read afterwards, and those of a prefill server in this very process never came.
        self._registry = InstanceRegistry(
            self._options.peer_timeout_seconds, lambda: self._loop.awake_seconds
        )
        # Look-ups that wait, by room, and all of them in the order in which they will be given up:
        # neither an announcement nor the clock looks at those of other rooms.
        self._parked: dict[int, list[_Parked]] = {}
        self._queue: collections.OrderedDict[_Parked, None] = collections.OrderedDict()
        self._grace_until = 0.0
        self._timer: Timer | None = None
        self._channel = ServerChannel(
            self._loop, self._tally, self._options, self._on_message, lambda peer, why: None
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def failure(self) -> str | None:
        """Why its thread has died, or None."""
        error = self._loop.failure
        return None if error is None else f"bootstrap control thread died: {error!r}"

    def start(self) -> None:
        """Opens the port and starts to serve.

        Raises:
            PortInUseError: If the port is taken.
            InsecureBindError: If it would listen beyond loopback without keys.
        """
        self._loop.start()
        try:
            self._port = self._loop.call(self._open)
        except OSError:
            if self._own_loop:
                self._loop.stop()
            raise
        except ValueError:
            if self._own_loop:
                self._loop.stop()
            raise
        logging.info("bootstrap server listens on %s", host_port(self._host, self._port))

    def stop(self) -> None:
        """Closes the port. Idempotent."""
        self._loop.post(self._close)
        if self._own_loop:
            self._loop.stop()

    def counters(self) -> dict[str, int]:
        """Returns instances, rooms, parked look-ups, and totals of ignored messages."""
        return {
            "bootstrap_instances": self._registry.num_instances,
            "bootstrap_rooms": self._registry.num_rooms,
            "bootstrap_parked": len(self._queue),
            **{f"bootstrap_{name}": total for name, total in self._tally.snapshot().items()},
        }

    def _open(self) -> int:
        port = self._channel.open(self._host, self._port)
        timeout = self._options.peer_timeout_seconds
        # Whoever was registered with a predecessor comes back within one heartbeat.
        self._grace_until = self._loop.clock() + timeout
        self._expire()
        return port

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._channel.close()

    def _on_message(self, peer: bytes, message: Message) -> None:
        match message:
            case Register(instance=instance):
                self._register(peer, instance)
            case Heartbeat(instance_id=instance_id, generation=generation):
                known = self._registry.heartbeat(instance_id, generation)
                self._channel.send(peer, HeartbeatAck(known=known))
            case Withdraw(instance_id=instance_id, generation=generation):
                if self._registry.withdraw(instance_id, generation):
                    self._answer_all()
                else:
                    self._tally.add("ignored_unknown_instance")
            case Announce(instance_id=instance_id, rooms=rooms):
                if self._registry.announce(instance_id, rooms):
                    for room in rooms:
                        self._answer_parked(room)
                else:
                    self._tally.add("ignored_unknown_instance")
            case Retract(instance_id=instance_id, rooms=rooms):
                self._registry.retract(instance_id, rooms)
            case Lookup():
                self._look_up(peer, message)
            case _:
                self._tally.add("ignored_unexpected")

    def _register(self, peer: bytes, instance: Instance) -> None:
        reason = self._registry.register(instance)
        if reason is not None:
            self._channel.send(peer, Refused(reason=reason, status=503))
            return
        lease_seconds = self._registry.lease_seconds
        self._channel.send(peer, Registered(lease_seconds=lease_seconds))
        self._answer_all()

    def _look_up(self, peer: bytes, lookup: Lookup) -> None:
        instance = self._registry.find(lookup.room, lookup.instance_id, only=self.settled)
        now = self._loop.clock()
        if instance is not None:
            self._channel.send(peer, LookupReply(query=lookup.query, instance=instance))
        elif lookup.instance_id is not None:
            reason = f"prefill server {lookup.instance_id} is not registered"
            self._channel.send(peer, LookupReply(query=lookup.query, reason=reason))
        elif self._registry.num_instances == 0 and now >= self._grace_until:
            self._channel.send(peer, LookupReply(query=lookup.query, reason=self._none()))
        elif len(self._queue) >= _MAX_PARKED:
            reason = f"{_MAX_PARKED} look-ups are waiting already"
            self._channel.send(peer, LookupReply(query=lookup.query, reason=reason))
        else:
            # Several instances and none of them has the room yet, or this server has just started.
            until = max(self._grace_until, now + _PARK_SECONDS)
            parked = _Parked(peer, lookup.query, lookup.room, until)
            self._parked.setdefault(lookup.room, []).append(parked)
            self._queue[parked] = None

    @property
    def settled(self) -> bool:
        """Whether all who were registered with a predecessor have had the time to come back.

        Until then the only instance here may be one of several, and not the one with the room.
        """
        return self._loop.clock() >= self._grace_until

    def _none(self) -> str:
        where = host_port(self._host, self._port)
        return f"no prefill server is registered with the bootstrap server {where}"

    def _answer_parked(self, room: int) -> None:
        if room not in self._parked:
            return
        instance = self._registry.find(room, only=self.settled)
        if instance is None:
            return
        for parked in self._parked.pop(room, []):
            del self._queue[parked]
            self._channel.send(parked.peer, LookupReply(query=parked.query, instance=instance))

    def _answer_all(self) -> None:
        """Answers all that wait, if there is nothing to choose from: one instance, or none."""
        if not self.settled or self._registry.num_instances > 1:
            return
        for room in list(self._parked):
            self._answer_parked(room)
        while self._queue:
            self._give_up(next(iter(self._queue)), self._none())

    def _give_up(self, parked: _Parked, reason: str) -> None:
        del self._queue[parked]
        waiting = self._parked[parked.room]
        waiting.remove(parked)
        if not waiting:
            del self._parked[parked.room]
        self._channel.send(parked.peer, LookupReply(query=parked.query, reason=reason))

    def _expire(self) -> None:
        for instance in self._registry.expire():
            where = host_port(instance.host, instance.side_channel_port)
            logging.warning("prefill server %s: lease over, dropped", where)
        self._answer_all()
        now = self._loop.clock()
        while self._queue and (oldest := next(iter(self._queue))).until <= now:
            self._give_up(oldest, f"no prefill server has announced room {oldest.room}")
        # Whatever begins before the next look ends after it.
        waits = [self._options.peer_timeout_seconds, _PARK_SECONDS]
        waits.append(self._registry.next_expiry_seconds)
        if not self.settled:
            waits.append(self._grace_until - now)
        if self._queue:
            waits.append(next(iter(self._queue)).until - now)
        self._timer = self._loop.call_later(max(_LEAST_WAIT_SECONDS, min(waits)), self._expire)
