# SPDX-License-Identifier: Apache-2.0
"""The manager of a decode server: its rooms and the prefill servers that it talks to.

A receiver first finds its prefill server (bootstrap look-up, greeting, canary: once per server, not
per room), mentions its room there, and asks for pages when it is told that they are reserved.
"""

from collections.abc import Callable, Sequence

from kvferry.control.connection import KVPages, TransferFailure
from kvferry.control.control_loop import ControlLoop
from kvferry.control.decode_desk import DecodeDesk
from kvferry.control.decode_rooms import DecodeRooms, Receiver
from kvferry.control.engines.base import TransferEngine
from kvferry.control.kv_layout import KVLayout
from kvferry.control.messages import Message
from kvferry.control.zmq_manager import ControlOptions


class DecodeManager(DecodeRooms):
    """A decode server's end of all transfers; see `ZmqManager` for the arguments."""

    def __init__(
        self,
        options: ControlOptions,
        layout: KVLayout,
        pages: KVPages,
        engine: TransferEngine,
        *,
        on_event: Callable[[], None],
        loop: ControlLoop | None = None,
    ) -> None:
        super().__init__(options, layout, pages, engine, on_event=on_event, loop=loop)
        self._desk = DecodeDesk(self)
        self._finished_pulls = 0

    def open_receiver(self, host: str, port: int, room: int) -> Receiver:
        """Opens the decode leg of a room.

        Args:
            host: Name or address of the bootstrap server.
            port: Its port.
            room: The meeting id, 0 <= room < 2**63.

        Returns:
            The leg; already `Failed` if it cannot succeed.

        Raises:
            ValueError: If room or port is out of range or the room's decode leg is open already.
            RuntimeError: If the manager is not started.
        """
        self.check_open(room)
        if not 0 < port <= 65535:
            raise ValueError(f"bootstrap port must be between 1 and 65535, got {port}")
        receiver = Receiver(self, room, self.ids.next_id())
        with self.lock:
            if room in self.rooms:
                raise ValueError(f"room {room} is in use by another request; rooms are for one use")
            failure = self.refusal_locked(len(self.receivers))
            if failure is None:
                self.rooms.add(room)
                self.receivers[receiver.transfer_id] = receiver
            else:
                receiver.fail_locked(failure)
            if not self._stopped:
                # Also what was refused: the prefill server is told, or it would wait. Posted under
                # the lock, so that nothing is looked for after `stop`.
                self.loop.post(lambda: self._desk.find(receiver, host, port))
        if failure is not None:
            self.tally.add("transfers_failed")
        return receiver

    def post_request(self, receiver: Receiver) -> None:
        """Has the request for pages sent, as soon as the prefill server is known."""
        self.loop.post(lambda: self._desk.send_request(receiver))

    def sweep(self) -> None:
        """Fails what has made no progress, and tells peers what has."""
        limit = max(
            self.options.progress_timeout_seconds, self.options.orphan_timeout_seconds + 1.0
        )
        with self.lock:
            receivers = list(self.receivers.values())
            moving = self.workers.finished != self._finished_pulls
            self._finished_pulls = self.workers.finished
            for receiver in receivers:
                if moving and receiver.waits_for_pulls:
                    receiver.mark_progress()
        for receiver in receivers:
            if receiver.wanted is not None and receiver.machine.stalled_seconds() > limit:
                state = receiver.poll().name
                reason = f"room {receiver.room}: no progress in {limit:g} s, state {state}"
                self.fail(receiver, TransferFailure(reason, 503))
        self._desk.send_touched(receivers)

    def counters(self) -> dict[str, int]:
        """Returns gauges of what is held now and totals since the start."""
        names = ("transfers_ok", "transfers_failed", "chunks_received", "bytes_received")
        totals = dict.fromkeys(names, 0)
        gauges = {
            "open_rooms": len(self.receivers),
            "pending_pulls": self.workers.pending,
            "peers": self._desk.num_peers,
        }
        return {**totals, **self.tally.snapshot(), **gauges, **self.engine.counters()}

    def open_channel(self) -> int:
        """Starts the worker threads; a decode server listens nowhere."""
        self.workers.start()
        self.resolver.start()
        return 0

    def close_channel(self) -> None:
        """Disconnects from bootstrap and prefill servers."""
        self._desk.close()

    def _stop_threads(self) -> None:
        self.workers.stop()
        self.resolver.stop()

    def post_abort(self, receiver: Receiver) -> None:
        """Has the prefill server told, if it is known, that the receiver has failed."""
        self.loop.post(lambda: self._desk.send_abort(receiver))

    def post_messages(self, receiver: Receiver, messages: Sequence[Message]) -> None:
        """Has messages sent to the receiver's prefill server."""
        self.loop.post(lambda: self._desk.send_all(receiver, messages))
