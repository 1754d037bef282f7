# SPDX-License-Identifier: Apache-2.0
"""Keeps a prefill server registered with its bootstrap server, whatever happens to the latter.

The bootstrap server may come back at another address: its name is looked up again whenever it was
lost, or could not be reached at any of the addresses that the name had.
"""

import math
import time
from collections.abc import Callable, Iterable

from absl import logging

from kvferry.control.control_loop import ControlLoop, Timer
from kvferry.control.messages import (
    Announce,
    Heartbeat,
    HeartbeatAck,
    Instance,
    Message,
    Refused,
    Register,
    Registered,
    Retract,
    Withdraw,
)
from kvferry.control.names import Names
from kvferry.control.security import host_port
from kvferry.control.side_channel import ChannelOptions, ClientChannel
from kvferry.control.tally import Tally

_RETRY_SECONDS = 0.5
_HEARTBEATS_PER_LEASE = 3


class Registration:
    """The registration of one instance. Everything runs on the control loop's thread.

    Args:
        loop: The control loop.
        tally: Gets the totals of ignored messages.
        options: Timeouts and keys.
        names: Looks the bootstrap server's name up.
        server: Name or address, and port of the bootstrap server. If the name has several
            addresses, they are tried in turn until one takes the registration.
        instance: What to register.
        rooms: Returns the rooms that are open now; announced again after a re-registration.
    """

    def __init__(
        self,
        loop: ControlLoop,
        tally: Tally,
        options: ChannelOptions,
        names: Names,
        server: tuple[str, int],
        instance: Instance,
        rooms: Callable[[], Iterable[int]],
    ) -> None:
        self._loop = loop
        self._tally = tally
        self._options = options
        self._names = names
        self._host, self._port = server[0].strip("[]"), server[1]
        self._addresses: list[str] = []  # Of the last look-up that had an answer,
        self._untried: list[str] = []  # and those of them that are still to be tried.
        self._instance = instance
        self._rooms = rooms
        self._channel: ClientChannel | None = None
        self._heartbeat: Timer | None = None
        self._retry: Timer | None = None
        self._closed = False
        self._complained = False
        self._lost_at = -math.inf  # Of the monotonic clock; not ready before the first time.
        self._problem = "not registered yet"
        self.registered = False

    @property
    def problem(self) -> str | None:
        """Why decode servers cannot find this instance, or None. Any thread.

        A short gap, as when the bootstrap server restarts, is none.
        """
        gap_seconds = time.monotonic() - self._lost_at
        if self.registered or gap_seconds < self._options.peer_timeout_seconds:
            return None
        where = host_port(self._host, self._port)
        return f"not registered with the bootstrap server {where}: {self._problem}"

    def open(self) -> None:
        """Connects and registers; tries again for ever when that fails."""
        if self._untried:
            self._connect()
        else:
            self._names.look_up(self._host, self._on_addresses, self._on_unknown)

    def _on_addresses(self, addresses: list[str]) -> None:
        self._addresses, self._untried = addresses, list(addresses)
        self._connect()

    def _on_unknown(self, reason: str) -> None:
        if self._addresses:
            self._on_addresses(self._addresses)  # The name service may be what is missing.
        else:
            self._on_down(reason)

    def _connect(self) -> None:
        if self._closed:
            return
        self._channel = ClientChannel(
            self._loop, self._tally, self._options, self._register, self._on_message, self._on_down
        )
        self._channel.open(self._untried.pop(0), self._port)

    def announce(self, room: int) -> None:
        """Tells the bootstrap server that the room is here."""
        if self.registered and self._channel is not None:
            self._channel.send(Announce(instance_id=self._instance.instance_id, rooms=[room]))

    def retract(self, room: int) -> None:
        """Tells the bootstrap server that the room is over."""
        if self.registered and self._channel is not None:
            self._channel.send(Retract(instance_id=self._instance.instance_id, rooms=[room]))

    def close(self) -> None:
        """Withdraws and disconnects. Idempotent."""
        self._closed = True
        self._end_timers()
        if self._channel is not None:
            self._channel.send(self._ids(Withdraw))
            self._channel.close()
            self._channel = None
        self.registered = False

    def _ids(self, kind: type[Withdraw] | type[Heartbeat]) -> Message:
        return kind(instance_id=self._instance.instance_id, generation=self._instance.generation)

    def _end_timers(self) -> None:
        for timer in (self._heartbeat, self._retry):
            if timer is not None:
                timer.cancel()
        self._heartbeat = self._retry = None

    def _register(self) -> None:
        if self._channel is not None:
            self._channel.send(Register(instance=self._instance))

    def _on_message(self, message: Message) -> None:
        match message:
            case Registered(lease_seconds=lease_seconds):
                self._on_registered(lease_seconds)
            case HeartbeatAck(known=known):
                if not known:
                    self._note_loss("it has forgotten this server")
                    self._register()
            case Refused(reason=reason):
                self._on_down(f"registration refused: {reason}")
            case _:
                self._tally.add("ignored_unexpected")

    def _on_registered(self, lease_seconds: float) -> None:
        self.registered = True
        self._complained = False
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        # A peer's number: keep it within reason.
        period = min(max(lease_seconds, 0.1), 60.0) / _HEARTBEATS_PER_LEASE
        self._heartbeat = self._loop.every(period, self._beat)
        rooms = list(self._rooms())
        if self._channel is not None:
            logging.info("registered with the bootstrap server %s", self._channel.target)
            if rooms:
                self._channel.send(Announce(instance_id=self._instance.instance_id, rooms=rooms))

    def _beat(self) -> None:
        if self._channel is not None:
            self._channel.send(self._ids(Heartbeat))

    def _on_down(self, reason: str) -> None:
        if self._closed:
            return
        self._note_loss(reason)
        self._end_timers()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if not self._complained:
            logging.warning("bootstrap server not available, trying on: %s", reason)
            self._complained = True
        self._retry = self._loop.call_later(_RETRY_SECONDS, self.open)

    def _note_loss(self, reason: str) -> None:
        self._problem = reason
        if self.registered:
            self.registered = False
            self._lost_at = time.monotonic()
            self._untried.clear()
