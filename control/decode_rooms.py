# SPDX-License-Identifier: Apache-2.0
"""The rooms of a decode server: receivers.

Chunks are pulled on worker threads into fresh arrays; only `commit`, on the step thread, writes to
the reserved pages. All tables are guarded by one lock that is never held during I/O or a scatter.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import logging

from kvferry.control.connection import KVPages, KVReceiver, PageRequest, TransferFailure
from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.base import TransferEngine
from kvferry.control.kv_layout import KVLayout
from kvferry.control.kv_poll import KVPoll
from kvferry.control.leg import Leg, check_extra, sendable
from kvferry.control.messages import KVChunk, KVChunkDone, KVMetadata, Message
from kvferry.control.peer import PrefillPeer
from kvferry.control.verified_pages import VerifiedPages
from kvferry.control.workers import WorkerPool
from kvferry.control.zmq_manager import ControlOptions, ZmqManager

_MAX_QUEUED_PULLS = 65536
_MAX_QUEUED_NAMES = 1024
# A name server that does not answer holds a thread for many seconds; the other names go past it.
_RESOLVERS = 4


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A chunk that was pulled and waits to be scattered."""

    chunk: KVChunk
    arrays: list[jax.Array]
    num_bytes: int


class Receiver(Leg, KVReceiver):
    """The decode leg of a room. Made by `DecodeManager.open_receiver`.

    Attributes:
        transfer_id: One-shot id of this attempt.
        wanted: What was asked for, or None before `request`.
        page_ids: The reserved pages.
        peer: The prefill server, once found and ready. Control thread only, as `request_sent`.
    """

    def __init__(self, manager: "DecodeRooms", room: int, transfer_id: int) -> None:
        super().__init__(room, manager.lock)
        self._manager = manager
        self.transfer_id = transfer_id
        self.wanted: PageRequest | None = None
        self.page_ids: tuple[int, ...] = ()
        self.peer: PrefillPeer | None = None
        self.request_sent = False
        self.next_sequence = 0
        self.next_page = 0
        self.last_sequence: int | None = None
        self.arrived: dict[int, Arrived] = {}
        self.num_committed = 0
        self._last_metadata: KVMetadata | None = None

    @property
    def waits_for_pulls(self) -> bool:
        """Whether chunks are announced that have not arrived."""
        return self.next_sequence > self.num_committed + len(self.arrived)

    @property
    def metadata(self) -> KVMetadata | None:
        """What came with the last chunk; set in `Success`."""
        return self._last_metadata if self.poll() is KVPoll.Success else None

    def request(
        self,
        page_ids: Sequence[int],
        *,
        prompt_tokens: int,
        first_page: int = 0,
        extra: dict[str, int | float | str | bool] | None = None,
    ) -> None:
        """Asks for the prompt's pages; see `KVReceiver.request`."""
        check_extra(extra)
        wanted = PageRequest(
            first_page=first_page,
            num_pages=len(page_ids),
            prompt_tokens=prompt_tokens,
            extra=extra or {},
        )
        with self.lock:
            if self.wanted is not None:
                raise RuntimeError(f"room {self.room}: pages were requested before")
            self.wanted = wanted
            self.page_ids = tuple(page_ids)
            self.next_page = first_page
            self.machine.touch()
        self._manager.post_request(self)

    def commit(self) -> int:
        """Scatters what has arrived into the reserved pages; see `KVReceiver.commit`."""
        with self.lock:
            if self.machine.state.terminal or not self.arrived:
                return 0
            arrived = [self.arrived[sequence] for sequence in sorted(self.arrived)]
            self.arrived.clear()
            wanted = self.wanted
        assert wanted is not None  # Chunks are only taken after the request.
        checks: list[jax.Array] = []
        pool = self._manager.pages
        for each in arrived:
            start = each.chunk.first_page - wanted.first_page
            pages = self.page_ids[start : start + each.chunk.num_pages]
            if pages:
                pool.scatter(each.arrays, pages)
                if isinstance(pool, VerifiedPages):
                    checks.append(pool.check(each.arrays, pages))
        if checks:
            self._manager.verify(self, arrived, checks)
        else:
            self._manager.committed(self, arrived)
        return len(arrived)

    def note_committed_locked(self, arrived: Sequence[Arrived]) -> bool:
        """Counts scattered chunks; the caller holds the lock. Returns whether these end it."""
        if self.machine.state.terminal:
            return False
        self.num_committed += len(arrived)
        self.num_bytes += sum(each.num_bytes for each in arrived)
        self.machine.touch()
        for each in arrived:
            self._last_metadata = each.chunk.metadata or self._last_metadata
        if self.last_sequence is None or self.num_committed <= self.last_sequence:
            return False
        return self.machine.advance(KVPoll.Success)

    def abort(self, reason: str, status: int = 503) -> None:
        """Ends the leg and tells P at once."""
        self._manager.fail(self, TransferFailure(reason, status))


class DecodeRooms(ZmqManager):
    """All receivers of a process; see `ZmqManager` for the arguments."""

    role = "decode"

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
        self.workers = WorkerPool("kv-pull", options.pull_workers, _MAX_QUEUED_PULLS)
        self.resolver = WorkerPool("kv-resolve", _RESOLVERS, _MAX_QUEUED_NAMES)
        self.receivers: dict[int, Receiver] = {}  # By transfer id.
        self.rooms: set[int] = set()

    def committed(self, receiver: Receiver, arrived: Sequence[Arrived]) -> None:
        """Records scattered chunks and acknowledges them. On the step thread, or a worker's."""
        with self.lock:
            done = receiver.note_committed_locked(arrived)
            if done:
                self.remove_locked(receiver)
        self.tally.add("chunks_received", len(arrived))
        self.tally.add("bytes_received", sum(each.num_bytes for each in arrived))
        if done:
            self.tally.add("transfers_ok")
        elif receiver.poll().terminal:
            return  # Failed while scattering: P has been told, or has told us.
        messages = [
            KVChunkDone(
                transfer_id=receiver.transfer_id, room=receiver.room, sequence=each.chunk.sequence
            )
            for each in arrived
        ]
        self.post_messages(receiver, messages)

    def verify(
        self, receiver: Receiver, arrived: Sequence[Arrived], checks: Sequence[jax.Array]
    ) -> None:
        """Records scattered chunks once a worker thread has seen that they are what was sent."""

        def job() -> None:
            # Copied first: this thread must not run JAX programs, and `~` of an array is one.
            found = [np.asarray(check) for check in checks]
            wrong = sorted({int(layer) for check in found for layer in np.flatnonzero(~check)})
            if wrong:
                self.tally.add("corrupt_chunks")
                reason = (
                    f"room {receiver.room}: pages arrived with other contents than were sent, in"
                    f" {len(wrong)} layers, the first is {wrong[0]}"
                )
                logging.error("%s", reason)
                self.fail(receiver, TransferFailure(reason, 500))
                return
            self.committed(receiver, arrived)
            self.on_event()

        self.submit(receiver, "checking the pages", job)

    def submit(self, receiver: Receiver, what: str, job: Callable[[], None]) -> None:
        """Has something done for a receiver on a worker thread; if it breaks, the receiver fails.

        Args:
            receiver: For whom.
            what: Names it in that case.
            job: What to do.
        """

        def on_error(error: BaseException) -> None:
            self.fail(receiver, TransferFailure(f"{what} failed: {error!r}", 500))

        if not self.workers.submit(job, on_error):
            failure = TransferFailure("too many pulls are waiting in the decode server", 503)
            self.fail(receiver, failure)

    def fail(self, receiver: Receiver, failure: TransferFailure, *, tell: bool = True) -> None:
        """Ends a receiver. Any thread; only the first call counts.

        Args:
            receiver: Whose leg.
            failure: Why.
            tell: Whether P has to be told.
        """
        failure = sendable(failure)
        with self.lock:
            if not receiver.fail_locked(failure):
                return
            self.remove_locked(receiver)
            receiver.arrived.clear()
        logging.info("room %d: decode leg failed: %s", receiver.room, failure.reason)
        self.tally.add("transfers_failed")
        if tell:
            self.post_abort(receiver)
        self.on_event()

    def fail_all(self, failure: TransferFailure) -> None:
        """Ends all open legs of this process."""
        with self.lock:
            receivers = list(self.receivers.values())
        for receiver in receivers:
            self.fail(receiver, failure)

    def remove_locked(self, receiver: Receiver) -> None:
        """Forgets a receiver that has ended; the caller holds the lock."""
        self.receivers.pop(receiver.transfer_id, None)
        self.rooms.discard(receiver.room)

    @abc.abstractmethod
    def post_request(self, receiver: Receiver) -> None:
        """Has the request for pages sent, as soon as the prefill server is known. Any thread."""

    @abc.abstractmethod
    def post_abort(self, receiver: Receiver) -> None:
        """Has the prefill server told, if it is known, that the receiver has failed. Any thread."""

    @abc.abstractmethod
    def post_messages(self, receiver: Receiver, messages: Sequence[Message]) -> None:
        """Has messages sent to the receiver's prefill server. Any thread."""
