# SPDX-License-Identifier: Apache-2.0
"""The manager of a prefill server: its rooms, its side channel and its registration."""

import collections
import time
from collections.abc import Callable

from kvferry.control.connection import KVPages, TransferFailure
from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.base import TransferEngine
from kvferry.control.kv_layout import KVLayout
from kvferry.control.messages import Message, Touched
from kvferry.control.names import Names
from kvferry.control.prefill_desk import PrefillDesk
from kvferry.control.prefill_rooms import DecodeLeg, PrefillRooms
from kvferry.control.registration import Registration
from kvferry.control.security import known_addresses, resolve
from kvferry.control.workers import WorkerPool
from kvferry.control.zmq_manager import ControlOptions


class PrefillManager(PrefillRooms):
    """A prefill server's end of all transfers; see `ZmqManager` for the arguments."""

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
        self._resolver = WorkerPool("kv-resolve", 1, 1)
        self._registration: Registration | None = None
        self._desk = PrefillDesk(self)

    def post_message(self, peer: bytes, message: Message) -> None:
        """Has a message sent by the control thread. Any thread."""
        self.loop.post(lambda: self._desk.send(peer, message))

    def post_room(self, room: int, *, held: bool) -> None:
        """Has the bootstrap server told that a room is here, or is over. Any thread."""
        self.loop.post(lambda: self._note_room(room, held))

    @property
    def not_ready(self) -> str | None:
        """Why decode servers cannot find this process for now, or None."""
        return self._registration.problem if self._registration is not None else None

    def sweep(self) -> None:
        """Fails what has made no progress, and tells peers what has."""
        now = time.monotonic()
        orphan, stall = self.options.orphan_timeout_seconds, self.options.progress_timeout_seconds
        touched: dict[bytes, list[int]] = collections.defaultdict(list)
        late: list[tuple[DecodeLeg, TransferFailure]] = []
        with self.lock:
            senders = list(self.senders.values())
            self.late_decode.expire()
            self.late_prefill.expire()
            for leg in [leg for leg in self.early.values() if now - leg.since > orphan]:
                del self.early[leg.room]
                reason = (
                    f"no request for room {leg.room} reached the prefill server in {orphan:g} s"
                )
                late.append((leg, TransferFailure(reason, 503)))
                # Should it come after all, it must not wait as long again.
                self.late_prefill.put(leg.room, late[-1][1])
            for sender in senders:
                if sender.touched and sender.leg is not None:
                    sender.touched = False
                    touched[sender.leg.peer].append(sender.leg.transfer_id)
        for peer, transfer_ids in touched.items():
            self._desk.send(peer, Touched(transfer_ids=transfer_ids))
        for leg, failure in late:
            self.tell_failed(leg, failure)
        for sender in senders:
            limit = orphan if sender.leg is None else stall
            if sender.machine.stalled_seconds() <= limit:
                continue
            if sender.leg is None:
                reason = f"no decode server asked for room {sender.room} in {orphan:g} s"
            else:
                reason = f"room {sender.room}: no progress in {stall:g} s"
            self.fail(sender, TransferFailure(reason, 503))

    def counters(self) -> dict[str, int]:
        """Returns gauges of what is held now and totals since the start."""
        with self.lock:
            gauges = {
                "open_rooms": len(self.senders),
                "early_rooms": len(self.early),
                "tombstones": len(self.late_decode) + len(self.late_prefill),
                "published_bytes": self.published_bytes,
                "published_chunks": sum(len(each.published) for each in self.senders.values()),
                "pending_pulls": 0,
            }
        peers = {"peers": self._desk.num_peers}
        totals = {"transfers_ok": 0, "transfers_failed": 0, "bytes_sent": 0}
        return {**totals, **self.tally.snapshot(), **gauges, **peers, **self.engine.counters()}

    def open_channel(self) -> int:
        """Opens the side channel; returns its port."""
        return self._desk.open(self.options.host, self.options.side_channel_port)

    def close_channel(self) -> None:
        """Withdraws the registration and closes the side channel."""
        if self._registration is not None:
            self._registration.close()
        self._desk.close()

    def _prepare(self) -> None:
        host = self.options.bootstrap_host
        if self.options.bootstrap_port and not known_addresses(host):
            resolve(host)  # A name with a mistake in it is best seen at the start.

    def _stop_threads(self) -> None:
        self._resolver.stop()

    def _opened(self) -> None:
        self._desk.make_canary(self.instance.instance_id)
        if self.options.bootstrap_port:
            if not known_addresses(self.options.bootstrap_host):
                self._resolver.start()
            self._registration = Registration(
                self.loop,
                self.tally,
                self.channel_options,
                Names(self.loop, self._resolver),
                (self.options.bootstrap_host, self.options.bootstrap_port),
                self.instance,
                lambda: list(self.senders),
            )
            self._registration.open()

    def _note_room(self, room: int, held: bool) -> None:
        if self._registration is None:
            return
        if held:
            self._registration.announce(room)
        else:
            self._registration.retract(room)
