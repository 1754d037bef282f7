# SPDX-License-Identifier: Apache-2.0
"""A decode server's connection to one prefill server, and the check that the two fit.

Before the first room is mentioned, the two compare everything that could make one of them misread
the other: protocol version (in each frame), role, layout, engine and its settings. Then test arrays
travel through the transfer engine, because a connection that "stands" proves nothing there.

Everything runs on the control loop's thread, but for the pull of the test arrays.
"""

import dataclasses
from collections.abc import Callable

from absl import logging

from kvferry.control.connection import TransferFailure
from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.base import TransferEngine, TransferError
from kvferry.control.engines.canary import canary_specs, check_canary
from kvferry.control.kv_layout import LayoutMismatchError, compare
from kvferry.control.messages import (
    CanaryDone,
    Hello,
    HelloWanted,
    Instance,
    Message,
    Refused,
    Welcome,
)
from kvferry.control.security import host_port
from kvferry.control.side_channel import ChannelOptions, ClientChannel
from kvferry.control.tally import Tally
from kvferry.control.workers import WorkerPool

_CANARY_SECONDS = 10.0


def check_fit(prefill: Instance, decode: Instance) -> None:
    """Refuses a pair of processes that cannot hand pages over.

    Args:
        prefill: The prefill server.
        decode: The decode server.

    Raises:
        LayoutMismatchError: If a layout, an engine or one of its settings differs; names it and
            both values.
    """
    if prefill.role != "prefill" or decode.role != "decode":
        raise LayoutMismatchError("role", prefill.role, decode.role)
    compare(prefill.layout, decode.layout)
    if prefill.engine.name != decode.engine.name:
        raise LayoutMismatchError("transfer engine", prefill.engine.name, decode.engine.name)
    ours, theirs = prefill.engine.settings, decode.engine.settings
    # How arrays are cut comes last: another setting may be the cause.
    for name in sorted({*ours, *theirs}, key=lambda name: (name == "shards", name)):
        if ours.get(name) != theirs.get(name):
            label = f"transfer engine setting {name}"
            raise LayoutMismatchError(label, ours.get(name), theirs.get(name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerContext:
    """What all connections of a decode server share.

    Attributes:
        loop: The control loop.
        tally: Gets the totals of ignored messages.
        options: Timeouts and keys.
        local: This process.
        engine: Its transfer engine.
        workers: Threads on which pulls run.
    """

    loop: ControlLoop
    tally: Tally
    options: ChannelOptions
    local: Instance
    engine: TransferEngine
    workers: WorkerPool


class PrefillPeer:
    """One prefill server, from the first room that needs it until its connection ends.

    Args:
        context: What all connections share.
        target: The prefill server as the bootstrap server knows it.
        on_message: Called with (peer, message) once the peer is ready.
        on_down: Called with (peer, failure) once, when the connection has ended.

    Attributes:
        instance: The prefill server; as it presents itself, once it is ready.
        ready: Whether rooms may be mentioned.
    """

    def __init__(
        self,
        context: PeerContext,
        target: Instance,
        on_message: Callable[["PrefillPeer", Message], None],
        on_down: Callable[["PrefillPeer", TransferFailure], None],
    ) -> None:
        self.instance = target
        self.ready = False
        self._context = context
        self._on_message = on_message
        self._on_down = on_down
        self._welcome: Welcome | None = None
        self._ended = False
        self._waiting: list[tuple[Callable[[], None], Callable[[TransferFailure], None]]] = []
        self._channel = ClientChannel(
            context.loop, context.tally, context.options, self._greet, self._take, self.end
        )

    def open(self) -> None:
        """Connects."""
        self._channel.open(self.instance.host, self.instance.side_channel_port)

    def when_ready(
        self, on_ready: Callable[[], None], on_failed: Callable[[TransferFailure], None]
    ) -> None:
        """Calls `on_ready` as soon as the peer may be used, or `on_failed` if it never can be."""
        if self.ready:
            on_ready()
        else:
            self._waiting.append((on_ready, on_failed))

    def send(self, message: Message) -> bool:
        """Sends a message; returns False if the connection is gone or blocked."""
        return self._channel.send(message)

    def close(self) -> None:
        """Ends the connection after sending what is queued; nobody is called. Idempotent."""
        self._ended = True
        self._channel.close()

    def end(self, reason: str, status: int = 503) -> None:
        """Ends the connection and tells everyone who uses it.

        Args:
            reason: Why.
            status: HTTP status that fits.
        """
        if self._ended:
            return
        self._ended = True
        self.ready = False
        where = host_port(self.instance.host, self.instance.side_channel_port)
        failure = TransferFailure(f"prefill server {where}: {reason}", status)
        waiting, self._waiting = self._waiting, []
        for _, on_failed in waiting:
            on_failed(failure)  # May still send, if it was not the connection that failed.
        self._channel.close()
        self._on_down(self, failure)

    def _greet(self) -> None:
        context = self._context
        self._channel.send(Hello(instance=context.local))
        context.loop.call_later(context.options.peer_timeout_seconds, self._check_welcomed)

    def _check_welcomed(self) -> None:
        if self._welcome is None:
            self.end("no answer to our greeting")

    def _take(self, message: Message) -> None:
        match message:
            case Refused(reason=reason, status=status):
                self.end(f"refused this decode server: {reason}", status)
            case HelloWanted():
                # It has given us up or restarted: what we had with it is gone.
                self.end("the connection was lost")
            case Welcome() if self._welcome is None:
                self._welcomed(message)
            case _ if self.ready:
                self._on_message(self, message)
            case _:
                self._context.tally.add("ignored_unexpected")

    def _welcomed(self, welcome: Welcome) -> None:
        self._welcome = welcome
        theirs, ours = welcome.instance, self._context.local
        if theirs.instance_id != self.instance.instance_id:
            self.end("another process answers at its address; it has restarted")
            return
        try:
            check_fit(theirs, ours)
        except LayoutMismatchError as error:
            self.end(str(error), 500)
            return
        self.instance = theirs
        if theirs.engine.versions != ours.engine.versions:
            logging.info(
                "engine versions differ: prefill %s, decode %s",
                theirs.engine.versions,
                ours.engine.versions,
            )
        if not self._context.workers.submit(lambda: self._pull_canary(welcome), self._on_fault):
            self.end("too many pulls are waiting in this decode server")

    def _on_fault(self, error: BaseException) -> None:
        reason = f"checking the data path failed: {error!r}"
        self._context.loop.post(lambda: self.end(reason, 500))

    def _pull_canary(self, welcome: Welcome) -> None:
        # On a worker thread.
        engine, address = self._context.engine, welcome.instance.engine.address
        engine.disconnect(address)  # Of a predecessor at the same address.
        try:
            pull = engine.pull(address, welcome.canary_key, canary_specs(), _CANARY_SECONDS)
            while not pull.wait(0.1):
                if self._ended:
                    pull.cancel()
                    return
            check_canary(welcome.instance.instance_id, pull.result())
        except TransferError as error:
            reason = f"test arrays did not arrive from its transfer engine at {address}: {error}"
            self._context.loop.post(lambda: self.end(reason))
            return
        self._context.loop.post(lambda: self._verified(welcome.canary_key))

    def _verified(self, canary_key: int) -> None:
        if self._ended:
            return
        self.send(CanaryDone(canary_key=canary_key))
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for on_ready, _ in waiting:
            on_ready()
