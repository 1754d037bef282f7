# SPDX-License-Identifier: Apache-2.0
"""Typed messages over ZMQ: a ROUTER that listens, and DEALERs that connect to it.

Application code sees messages and peers, never sockets or frames. Bytes that are not a message are
counted and ignored. Both ends watch each other: the connecting end pings often enough for the less
patient of the two, and an end that hears nothing for its peer timeout gives the other up and says
so, for a peer that is only half cut off. The connecting end sees a lost connection at once.

With keys (`CurveKeys`) both ends must have the same ones. A handshake that fails is logged by the
listening end and told to the users of the connecting end.

One DEALER is one connection: when it is down it stays down, so nothing written for a dead peer can
reach its successor. Everything here runs on the control loop's thread.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import zmq
from absl import logging

from kvferry.control.accepted import AcceptedConnections
from kvferry.control.control_loop import ControlLoop, Timer
from kvferry.control.messages import MAX_SECONDS, Message, Ping, Pong, Refused
from kvferry.control.security import (
    CurveKeys,
    check_bind,
    check_connect,
    endpoint,
    host_port,
)
from kvferry.control.silence import SilenceWatch
from kvferry.control.sockets import (
    DOWN_EVENTS,
    HANDSHAKE_FAILURES,
    close_socket,
    key_hint,
    listen,
    new_socket,
    next_event,
    next_event_value,
    send_message,
)
from kvferry.control.tally import Tally
from kvferry.control.wire import MessageError, decode

_MAX_CONNECTIONS = 4096
_MESSAGES_PER_WAKE = 256
# Two that are lost, or late on a busy machine, do not end a connection.
_PINGS_PER_TIMEOUT = 4
# However impatient a peer says it is, it gets no more pings than for this.
_LEAST_TIMEOUT_SECONDS = 0.1
_GOODBYE_SECONDS = 0.2
# A peer with the wrong keys tries again and again: once in this time is told.
_QUIET_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """How channels behave.

    Attributes:
        peer_timeout_seconds: Silence after which a peer counts as dead. Positive, at most an hour.
            The two ends of a channel may differ.
        connect_timeout_seconds: Time in which a connection must be up. Positive.
        keys: CURVE keys, or None for plain sockets (loopback only).
    """

    peer_timeout_seconds: float = 3.0
    connect_timeout_seconds: float = 0.9
    keys: CurveKeys | None = None

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: If a time is out of range, naming it and its value.
        """
        for name in ("peer_timeout_seconds", "connect_timeout_seconds"):
            value = getattr(self, name)
            if not 0 < value <= MAX_SECONDS:
                raise ValueError(f"ChannelOptions.{name}={value} is not in (0, {MAX_SECONDS}]")


def _decode_counted(frame: bytes, tally: Tally) -> Message | MessageError:
    try:
        return decode(frame)
    except MessageError as error:
        tally.add(f"ignored_{error.kind}")
        return error


class ServerChannel:
    """A ROUTER socket and the peers connected to it.

    Args:
        loop: The control loop.
        tally: Gets the totals of ignored messages.
        options: See `ChannelOptions`.
        on_message: Called with (peer, message) for each message but Ping and Refused.
        on_lost: Called with (peer, why) once a peer has closed its connection, has been silent for
            the peer timeout, or has given this end up; `why` goes on after "the peer".
    """

    def __init__(
        self,
        loop: ControlLoop,
        tally: Tally,
        options: ChannelOptions,
        on_message: Callable[[bytes, Message], None],
        on_lost: Callable[[bytes, str], None],
    ) -> None:
        self._loop = loop
        self._tally = tally
        self._options = options
        self._on_message = on_message
        self._on_lost = on_lost
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: Any = None
        silence = f"has been silent for {options.peer_timeout_seconds:g} s"
        self._peers: SilenceWatch[bytes] = SilenceWatch(
            loop, options.peer_timeout_seconds, lambda peer: on_lost(peer, silence)
        )
        self._accepted = AcceptedConnections(loop, tally, self._on_closed)
        self._quiet_until = 0.0

    @property
    def num_peers(self) -> int:
        """Peers heard within the peer timeout."""
        return len(self._peers)

    def open(self, host: str, port: int) -> int:
        """Binds the socket. Loop thread only.

        Args:
            host: Numeric address.
            port: Port, or 0 for any free one.

        Returns:
            The port it listens on.

        Raises:
            PortInUseError: If the port is taken.
            InsecureBindError: If `host` is not loopback and there are no keys.
            OSError: If it cannot be bound for another reason.
        """
        check_bind(host, self._options.keys)
        made, bound = listen(self._loop, host, port, self._options.keys)
        self._socket = made
        self._loop.watch(made, self._receive)
        self._monitor = made.get_monitor_socket(
            sum(HANDSHAKE_FAILURES) | AcceptedConnections.EVENTS
        )
        self._loop.watch(self._monitor, self._see_events)
        self._accepted.watch(made)
        return bound

    def send(self, peer: bytes, message: Message) -> bool:
        """Sends to one peer. Loop thread only; never blocks.

        Returns:
            False if the peer is gone, or does not take what was sent to it before, or the message
            is too long.
        """
        return self._socket is not None and send_message(self._socket, [peer], message, self._tally)

    def forget(self, peer: bytes) -> None:
        """Stops watching a peer. Loop thread only."""
        self._peers.forget(peer)

    def close(self, linger_seconds: float = _GOODBYE_SECONDS) -> None:
        """Closes the socket after sending what is queued, for a bounded time. Loop thread only."""
        self._accepted.close()
        if self._socket is not None:
            close_socket(self._loop, self._socket, self._monitor, linger_seconds)
            self._socket = None
        self._peers.close()

    def _receive(self) -> None:
        self._see_events()  # What is received comes over connections of which they tell.
        for _ in range(_MESSAGES_PER_WAKE):
            if self._socket is None:
                return
            try:
                frames = self._accepted.receive()
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self._tally.add("ignored_malformed")
            return
        peer, frame = frames
        message = _decode_counted(frame, self._tally)
        if isinstance(message, MessageError):
            if message.kind == "version":
                self.send(peer, Refused(reason=str(message), status=503))
            return
        if peer not in self._peers and len(self._peers) >= _MAX_CONNECTIONS:
            self._tally.add("ignored_too_many_peers")
            return
        self._peers.heard(peer)
        match message:
            case Ping():
                self.send(peer, Pong(timeout_seconds=self._options.peer_timeout_seconds))
            case Refused(reason=reason):
                self._peers.forget(peer)
                self._on_lost(peer, f"has given the connection up: {reason}")
            case _:
                self._on_message(peer, message)

    def _on_closed(self, peer: bytes) -> None:
        if self._socket is None:
            return
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            # What it said before it closed comes first.
            self._loop.call_later(0.0, lambda: self._on_closed(peer))
        elif peer in self._peers:
            self._peers.forget(peer)
            self._on_lost(peer, "has closed the connection")

    def _see_events(self) -> None:
        while self._socket is not None and (seen := next_event_value(self._monitor)) is not None:
            self._accepted.see(*seen)
            if seen[0] not in HANDSHAKE_FAILURES:
                continue
            self._tally.add("refused_handshakes")
            now = self._loop.clock()
            if now >= self._quiet_until:
                self._quiet_until = now + _QUIET_SECONDS
                where = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
                hint = key_hint(self._options.keys)
                logging.warning("refused a peer that does not greet %s as we do; %s", where, hint)


class ClientChannel:
    """A DEALER socket with one connection, from connecting to down.

    Args:
        loop: The control loop.
        tally: Gets the totals of ignored messages.
        options: See `ChannelOptions`.
        on_up: Called once when the connection stands.
        on_message: Called with each message but Ping and Pong.
        on_down: Called once with the reason when the connection is gone; never after `close`.
    """

    def __init__(
        self,
        loop: ControlLoop,
        tally: Tally,
        options: ChannelOptions,
        on_up: Callable[[], None],
        on_message: Callable[[Message], None],
        on_down: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._tally = tally
        self._options = options
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: Any = None
        self._timers: dict[str, Timer] = {}
        self._period_seconds = options.peer_timeout_seconds / _PINGS_PER_TIMEOUT
        self._peer: SilenceWatch[str] = SilenceWatch(
            loop, options.peer_timeout_seconds, lambda _: self._give_up()
        )
        self._opened = False
        self.target = ""
        self.up = False

    def open(self, host: str, port: int) -> None:
        """Starts to connect. Loop thread only.

        Args:
            host: Numeric address.
            port: Port.
        """
        self.target = host_port(host, port)
        self._opened = True
        try:
            check_connect(host, self._options.keys)
            self._connect(host, port)
        except (zmq.ZMQError, ValueError) as error:
            # ZMQError: an address that nobody can have, or no more sockets. Told a little later:
            # the caller need not expect to be called back from here.
            reason = f"cannot connect: {error}"
            self._set_timer("down", 0.0, lambda: self._go_down(reason))

    def _connect(self, host: str, port: int) -> None:
        made = new_socket(self._loop, zmq.DEALER, host)
        if self._options.keys is not None:
            self._options.keys.secure_client(made)
        self._socket = made
        self._monitor = made.get_monitor_socket()
        self._loop.watch(self._monitor, self._see_events)
        self._loop.watch(made, self._receive)
        self._set_timer("connect", self._options.connect_timeout_seconds, self._check_connected)
        made.connect(endpoint(host, port))

    def send(self, message: Message) -> bool:
        """Sends to the peer. Loop thread only; never blocks.

        Returns:
            False if the connection is not up, or the peer has stopped to read, or the message is
            too long.
        """
        if self._socket is None or not self.up:
            return False
        return send_message(self._socket, [], message, self._tally)

    def close(self, linger_seconds: float = _GOODBYE_SECONDS) -> None:
        """Closes the connection after sending what is queued. Loop thread only; idempotent."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._peer.close()
        self._opened = self.up = False
        if self._socket is not None:
            close_socket(self._loop, self._socket, self._monitor, linger_seconds)
            self._socket = None

    def _go_down(self, reason: str, linger_seconds: float = 0.0) -> None:
        if self._opened:
            self.close(linger_seconds)
            self._on_down(f"{reason} ({self.target})")

    def _check_connected(self) -> None:
        if not self.up:
            self._go_down(f"no connection within {self._options.connect_timeout_seconds} s")

    def _see_events(self) -> None:
        while self._socket is not None and (event := next_event(self._monitor)) is not None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up = True
                self._peer.heard(self.target)
                self._ping()  # At once: the answer says how often the peer wants them.
                self._on_up()
            elif event in DOWN_EVENTS:
                self._receive()  # What the peer said before it closed comes first.
                reason = DOWN_EVENTS[event]
                if event in HANDSHAKE_FAILURES or (event == zmq.EVENT_DISCONNECTED and not self.up):
                    reason = f"{reason}; {key_hint(self._options.keys)}"
                self._go_down(reason)

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_WAKE):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                self._tally.add("ignored_malformed")
                continue
            message = _decode_counted(frames[0], self._tally)
            if isinstance(message, MessageError):
                if message.kind == "version":
                    self._go_down(str(message))
                continue
            self._peer.heard(self.target)
            match message:
                case Pong(timeout_seconds=timeout_seconds):
                    self._suit(timeout_seconds)
                case Ping():
                    self.send(Pong(timeout_seconds=self._options.peer_timeout_seconds))
                case _:
                    self._on_message(message)

    def _suit(self, timeout_seconds: float) -> None:
        """Pings often enough for a peer that is less patient than this end."""
        period_seconds = max(timeout_seconds, _LEAST_TIMEOUT_SECONDS) / _PINGS_PER_TIMEOUT
        if period_seconds < self._period_seconds:
            self._period_seconds = period_seconds
            self._ping()

    def _ping(self) -> None:
        self.send(Ping())
        self._set_timer("ping", self._period_seconds, self._ping)

    def _give_up(self) -> None:
        seconds = self._options.peer_timeout_seconds
        # This may arrive, although the answers are lost.
        self.send(Refused(reason=f"it has heard nothing for {seconds:g} s"))
        self._go_down(f"the peer has been silent for {seconds:g} s", _GOODBYE_SECONDS)

    def _set_timer(self, name: str, delay_seconds: float, action: Callable[[], None]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_later(delay_seconds, action)
