# SPDX-License-Identifier: Apache-2.0
"""The rooms of a prefill server: senders, and what decode servers have said.

A room has two legs here: the sender (this process's request) and the decode leg (what a decode
server has said about the room). Either may come first; they are joined when both are there. All
tables are guarded by one lock that is never held during I/O, a gather or a publication.
"""

import abc
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import logging

from kvferry.control.connection import KVPages, KVSender, PageRequest, TransferFailure
from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.base import TransferEngine, TransferError
from kvferry.control.kv_layout import KVLayout
from kvferry.control.kv_poll import KVPoll
from kvferry.control.leg import Leg, Tombstones, check_extra, sendable
from kvferry.control.messages import KVAccept, KVChunk, KVFailed, KVMetadata, Leaf, Message
from kvferry.control.zmq_manager import ControlOptions, ZmqManager

# What an engine says of arrays that it cannot publish, and JAX when there is no memory for a copy.
PUBLISH_ERRORS = (TransferError, jax.errors.JaxRuntimeError, ValueError)
# A backstop only: rooms without progress fail long before, and release what they published.
_PUBLISH_SECONDS = 3600.0
_TOMBSTONE_FACTOR = 2.0


@dataclasses.dataclass
class DecodeLeg:
    """What a decode server has said about a room.

    Attributes:
        peer: Its connection.
        room: The room.
        transfer_id: Its id for this attempt.
        since: When it first spoke of the room, in seconds of the monotonic clock.
        request: What it wants, once it has reserved pages.
    """

    peer: bytes
    room: int
    transfer_id: int
    since: float
    request: PageRequest | None = None


class Sender(Leg, KVSender):
    """The prefill leg of a room. Made by `PrefillRooms.open_sender`."""

    def __init__(self, manager: "PrefillRooms", room: int) -> None:
        super().__init__(room, manager.lock)
        self._manager = manager
        self.leg: DecodeLeg | None = None
        self.published: dict[int, tuple[int, int]] = {}  # sequence -> (key, bytes)
        self.next_sequence = 0
        self.pages_sent = 0
        self.last_sent = False

    @property
    def peer(self) -> bytes | None:
        """The connection of the decode server."""
        return self.leg.peer if self.leg is not None else None

    @property
    def request(self) -> PageRequest | None:
        """What D wants, from `WaitingForInput` on."""
        return self.leg.request if self.leg is not None else None

    def send(
        self, page_ids: Sequence[int], *, last: bool, metadata: KVMetadata | None = None
    ) -> bool:
        """Hands over the next pages of the prompt; see `KVSender.send`."""
        self._check(page_ids, last, metadata)
        num_bytes = self._manager.reserve(self, len(page_ids))
        if num_bytes is None:
            return False
        key = self._manager.ids.next_id() if page_ids else 0
        with contextlib.ExitStack() as undo:
            undo.callback(self._manager.give_back, num_bytes)
            try:
                arrays = self._publish(key, page_ids)
            except PUBLISH_ERRORS as error:
                # Of these pages only: the pool is as it was, and the next room may fare better.
                status = 500 if isinstance(error, ValueError) else 503
                failure = TransferFailure(f"cannot publish pages: {error}", status)
                self._manager.fail(self, failure)
                return False
            undo.pop_all()
        return self._manager.announce_chunk(
            self,
            KVChunk(
                transfer_id=self.leg.transfer_id if self.leg is not None else 0,
                sequence=self.next_sequence,
                key=key,
                first_page=self.request.first_page + self.pages_sent if self.request else 0,
                num_pages=len(page_ids),
                leaves=[Leaf(array.shape, str(array.dtype)) for array in arrays],
                last=last,
                metadata=metadata,
            ),
            num_bytes,
        )

    def abort(self, reason: str, status: int = 503) -> None:
        """Ends the leg and tells D at once."""
        self._manager.fail(self, TransferFailure(reason, status))

    def _publish(self, key: int, page_ids: Sequence[int]) -> list[jax.Array]:
        if not page_ids:
            return []
        arrays = self._manager.pages.gather(page_ids)
        self._manager.engine.publish(key, arrays, _PUBLISH_SECONDS)
        return arrays

    def _check(self, page_ids: Sequence[int], last: bool, metadata: KVMetadata | None) -> None:
        state, request = self.poll(), self.request
        if state is KVPoll.Failed:
            return  # Reported by `poll`; a failure may come at any moment.
        if request is None or self.last_sent or state is KVPoll.Success:
            raise RuntimeError(
                f"room {self.room}: send() in state {state.name}"
                + (" after the last chunk" if self.last_sent else "")
            )
        sent, left = len(page_ids), request.num_pages - self.pages_sent
        if sent > left or (last and sent != left):
            raise ValueError(
                f"room {self.room}: {sent} pages given, {left} of {request.num_pages} are still"
                f" wanted{' and this is the last chunk' if last else ''}"
            )
        if not last and not page_ids:
            raise ValueError(f"room {self.room}: a chunk without pages that is not the last one")
        if last != (metadata is not None):
            raise ValueError(f"room {self.room}: metadata travels with the last chunk, only there")
        if metadata is not None:
            try:
                check_extra(metadata)
            except ValueError as error:
                raise ValueError(f"room {self.room}: metadata {error}") from error


class PrefillRooms(ZmqManager):
    """All senders of a process; see `ZmqManager` for the arguments."""

    role = "prefill"

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
        self.senders: dict[int, Sender] = {}
        self.early: collections.OrderedDict[int, DecodeLeg] = collections.OrderedDict()
        lifetime = _TOMBSTONE_FACTOR * self.options.orphan_timeout_seconds
        self.late_decode = Tombstones(lifetime, time.monotonic)
        self.late_prefill = Tombstones(lifetime, time.monotonic)
        self.published_bytes = 0
        self._refused_publication = False

    def open_sender(self, room: int) -> Sender:
        """Opens the prefill leg of a room.

        Args:
            room: The meeting id, 0 <= room < 2**63.

        Returns:
            The leg; already `Failed` if it cannot succeed any more.

        Raises:
            ValueError: If the room is out of range or its prefill leg is open already.
            RuntimeError: If the manager is not started.
        """
        self.check_open(room)
        sender = Sender(self, room)
        with self.lock:
            if room in self.senders:
                raise ValueError(f"room {room} is in use by another request; rooms are for one use")
            given_up = self.late_prefill.take(room)
            failure = given_up or self.refusal_locked(len(self.senders))
            leg = self.early.pop(room, None)
            if failure is not None:
                sender.fail_locked(failure)
                if leg is None and given_up is None:
                    self.late_decode.put(room, failure)
            else:
                self.senders[room] = sender
                # Posted under the lock, so that "over" cannot be posted before it.
                self.post_room(room, held=True)
                if leg is not None:
                    self.join_locked(sender, leg)
        if failure is not None:
            self.tally.add("transfers_failed")
            if leg is not None:
                self.tell_failed(leg, failure)
            return sender
        if sender.request is not None:
            self.on_event()
        return sender

    def join_locked(self, sender: Sender, leg: DecodeLeg) -> None:
        """Binds a decode leg to its sender; the caller holds the lock."""
        sender.leg = leg
        sender.machine.touch()
        if leg.request is not None:
            self.accept_locked(sender, leg)

    def accept_locked(self, sender: Sender, leg: DecodeLeg) -> None:
        """Lets the sender work, now that D has reserved pages; the caller holds the lock."""
        sender.machine.advance(KVPoll.WaitingForInput)
        self.post_message(leg.peer, KVAccept(transfer_id=leg.transfer_id))

    def reserve(self, sender: Sender, num_pages: int) -> int | None:
        """Reserves room for published bytes.

        A decode server gets as much of the limit as it leaves free for others, so one that takes
        nothing more cannot keep all of it. It always gets one chunk while anything is free.

        Returns:
            The bytes reserved, or None if there is no room or the sender has ended.
        """
        specs = self.pages.specs(num_pages) if num_pages else []
        num_bytes = sum(int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in specs)
        with self.lock:
            if sender.machine.state.terminal:
                return None
            free = self.options.max_published_bytes - self.published_bytes
            theirs = self._published_to_locked(sender.peer)
            fits = theirs + num_bytes <= free or (not theirs and free > 0)
            if not fits or not self.engine.has_room(specs):
                self._refused_publication = True
                return None
            self.published_bytes += num_bytes
            return num_bytes

    def _published_to_locked(self, peer: bytes | None) -> int:
        published = (each.published for each in self.senders.values() if each.peer == peer)
        return sum(num_bytes for chunks in published for _, num_bytes in chunks.values())

    def give_back(self, num_bytes: int) -> None:
        """Undoes `reserve`."""
        with self.lock:
            self.published_bytes -= num_bytes

    def announce_chunk(self, sender: Sender, chunk: KVChunk, num_bytes: int) -> bool:
        """Records a published chunk and tells D.

        Returns:
            False if the sender has failed meanwhile; the publication is then taken back.
        """
        with self.lock:
            gone = sender.machine.state.terminal or sender.leg is None
            if gone:
                self.published_bytes -= num_bytes
            else:
                sender.machine.advance(KVPoll.Transferring)
                sender.machine.touch()
                sender.published[chunk.sequence] = (chunk.key, num_bytes)
                sender.next_sequence += 1
                sender.pages_sent += chunk.num_pages
                sender.last_sent = chunk.last
        if gone or sender.leg is None:
            self.engine.release(chunk.key, delivered=False)
            return False
        self.post_message(sender.leg.peer, chunk)
        return True

    def acknowledge(self, sender: Sender, sequence: int) -> bool:
        """Lets go of a chunk that D has.

        Returns:
            False if there is no such chunk.
        """
        with self.lock:
            entry = sender.published.pop(sequence, None)
            if entry is None:
                return False
            key, num_bytes = entry
            self.published_bytes -= num_bytes
            sender.num_bytes += num_bytes
            sender.machine.touch()
            done = sender.last_sent and not sender.published
            if done:
                sender.machine.advance(KVPoll.Success)
                self.senders.pop(sender.room, None)
        self.engine.release(key, delivered=True)
        with self.lock:
            # After the release, which may be what somebody was refused for the lack of.
            wake = done or self._refused_publication
            self._refused_publication = False
        self.tally.add("bytes_sent", num_bytes)
        if done:
            self.tally.add("transfers_ok")
            self.post_room(sender.room, held=False)
        if wake:
            self.on_event()
        return True

    def fail(self, sender: Sender, failure: TransferFailure, *, tell: bool = True) -> None:
        """Ends a sender and releases what it published. Any thread; only the first call counts.

        Args:
            sender: Whose leg.
            failure: Why.
            tell: Whether D has to be told.
        """
        failure = sendable(failure)
        with self.lock:
            if not sender.fail_locked(failure):
                return
            self.senders.pop(sender.room, None)
            published, sender.published = list(sender.published.values()), {}
            self.published_bytes -= sum(num_bytes for _, num_bytes in published)
            self._refused_publication = False
            if sender.leg is None:
                self.late_decode.put(sender.room, failure)
        logging.info("room %d: prefill leg failed: %s", sender.room, failure.reason)
        if tell and sender.leg is not None:
            self.tell_failed(sender.leg, failure)
        # After the message, so that D hears the reason before its pull breaks off.
        keys = [key for key, _ in published]
        if not self.loop.post(lambda: self._release_all(keys)):
            self._release_all(keys)
        self.tally.add("transfers_failed")
        self.post_room(sender.room, held=False)
        self.on_event()

    def fail_all(self, failure: TransferFailure) -> None:
        """Ends all open legs of this process."""
        with self.lock:
            senders, early = list(self.senders.values()), list(self.early.values())
            self.early.clear()
        for sender in senders:
            self.fail(sender, failure)
        for leg in early:
            self.tell_failed(leg, failure)

    def _release_all(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.engine.release(key, delivered=False)
        # Room for what was refused.
        self.on_event()

    @abc.abstractmethod
    def post_message(self, peer: bytes, message: Message) -> None:
        """Has a message sent by the control thread. Any thread."""

    @abc.abstractmethod
    def post_room(self, room: int, *, held: bool) -> None:
        """Has the bootstrap server told that a room is here, or is over. Any thread."""

    def tell_failed(self, leg: DecodeLeg, failure: TransferFailure) -> None:
        """Tells a decode server that the room it asked for has failed."""
        message = KVFailed(
            transfer_id=leg.transfer_id, reason=failure.reason, status=failure.status
        )
        self.post_message(leg.peer, message)
