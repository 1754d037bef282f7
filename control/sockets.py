# SPDX-License-Identifier: Apache-2.0
"""The sockets below the side channel: made, secured, watched and closed. Loop's thread only."""

from collections.abc import Sequence
from typing import Any

import zmq
from absl import logging
from zmq.utils.monitor import recv_monitor_message

from kvferry.control.control_loop import ControlLoop
from kvferry.control.messages import Message
from kvferry.control.security import CurveKeys, KeyGate, endpoint, listen_error
from kvferry.control.tally import Tally
from kvferry.control.wire import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, MessageError, encode

HANDSHAKE_SECONDS = 3.0
_HIGH_WATER_MARK = 20_000
# Of each connection; the rest waits at the other end.
MAX_UNREAD_REQUESTS = 1000
_NEVER_MS = 24 * 3600 * 1000

HANDSHAKE_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the peer broke off the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the peer does not greet as we do",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the peer refused our key",
}
DOWN_EVENTS = {
    zmq.EVENT_CLOSED: "connection refused or unreachable",
    zmq.EVENT_DISCONNECTED: "connection closed by the peer",
    **HANDSHAKE_FAILURES,
}


def new_socket(loop: ControlLoop, kind: int, host: str) -> zmq.Socket[bytes]:
    """Makes a socket with the limits of the side channel.

    Args:
        loop: The control loop.
        kind: ZMQ socket type.
        host: Numeric address that it will bind or connect to.

    Returns:
        The socket.
    """
    made = loop.context.socket(kind)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    made.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    made.setsockopt(zmq.LINGER, 0)
    # A connection that does not greet holds a file descriptor for this long.
    made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
    if kind == zmq.DEALER:
        # One socket is one connection. Not -1, which is for that: libzmq then drops what has
        # arrived and was not read yet when the connection ends, such as the reason why it ends.
        made.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    if ":" in host:
        made.setsockopt(zmq.IPV6, 1)
    return made


def listen(
    loop: ControlLoop,
    host: str,
    port: int,
    keys: CurveKeys | None,
    max_message_bytes: int = MAX_REQUEST_BYTES,
) -> tuple[zmq.Socket[bytes], int]:
    """Makes a ROUTER that listens, and that says so when it cannot send to a peer.

    Args:
        loop: The control loop.
        host: Numeric address.
        port: Port, or 0 for any free one.
        keys: What peers must have, or None.
        max_message_bytes: A peer that sends more is cut off.

    Returns:
        The socket, and the port it listens on.

    Raises:
        PortInUseError: If the port is taken.
        OSError: If it cannot be bound for another reason.
    """
    made = new_socket(loop, zmq.ROUTER, host)
    # Anyone may connect here, so these bound what a busy or stuck process keeps for strangers.
    made.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    made.setsockopt(zmq.RCVHWM, MAX_UNREAD_REQUESTS)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        if keys is not None:
            secure_server(loop, made, keys)
        made.bind(endpoint(host, port if port else "*"))
    except zmq.ZMQError as error:
        made.close()
        raise listen_error(host, port, error) from error
    return made, int(made.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def secure_server(loop: ControlLoop, target: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Makes a socket, before it is bound, accept only peers that have the same keys.

    Args:
        loop: The control loop, on which the gate runs; it ends with the loop.
        target: The socket.
        keys: The keys.
    """
    keys.secure_server(target)
    try:
        gate = KeyGate(loop.context)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        return  # Another socket of this loop has brought it.
    loop.watch(gate.socket, gate.answer)


def next_event(monitor: Any) -> zmq.Event | None:
    """Returns what a monitor has seen next, a `zmq.EVENT_...`, or None."""
    seen = next_event_value(monitor)
    return None if seen is None else seen[0]


def next_event_value(monitor: Any) -> tuple[zmq.Event, int] | None:
    """Returns what a monitor has seen next, with its value, or None."""
    try:
        seen = recv_monitor_message(monitor, zmq.NOBLOCK)
    except zmq.Again:
        return None
    return zmq.Event(seen["event"]), int(seen["value"])


def send_message(
    sender: zmq.Socket[bytes], route: Sequence[bytes], message: Message, tally: Tally
) -> bool:
    """Sends a message if that is possible at once.

    Args:
        sender: The socket.
        route: Frames that come before it.
        message: The message.
        tally: Gets the total of what could not be sent, "undeliverable".

    Returns:
        Whether it was sent.
    """
    try:
        sender.send_multipart([*route, encode(message)], zmq.NOBLOCK)
    except (zmq.ZMQError, MessageError) as error:
        # EAGAIN: its queue is full, so it has stopped to read. A message that is too long counts as
        # undeliverable too: it must not end the loop's thread.
        tally.add("undeliverable")
        is_gone = isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH
        if not is_gone:
            logging.log_every_n_seconds(
                logging.WARNING, "cannot send %s: %s", 5, type(message).__name__, error
            )
        return False
    return True


def close_socket(
    loop: ControlLoop, closing: zmq.Socket[bytes], monitor: Any, linger_seconds: float
) -> None:
    """Closes a socket and its monitor.

    Args:
        loop: The control loop.
        closing: The socket.
        monitor: Its monitor, or None.
        linger_seconds: How long what is queued may take to leave.
    """
    loop.unwatch(closing)
    if monitor is not None:
        loop.unwatch(monitor)
        closing.disable_monitor()
        monitor.close(linger=0)
    closing.close(linger=int(linger_seconds * 1000))


def key_hint(keys: CurveKeys | None) -> str:
    """Returns what to look at after a handshake that failed."""
    if keys is None:
        return "this process has no --curve_key_file; the other end may have one"
    return f"the other end needs the --curve_key_file of this process, keys {keys.label}"
