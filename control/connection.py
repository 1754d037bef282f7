# SPDX-License-Identifier: Apache-2.0
"""The contract of a connection backend: manager, sender, receiver and bootstrap server.

The life of one room, and who does what:

1. Each server process makes one `KVManager`, starts it, and hands it its pages (`KVPages`).
2. P's scheduler gets a request with a room and calls `open_sender(room)`. D's scheduler gets the
   same request and calls `open_receiver(host, port, room)`. Either may come first by any margin.
3. The receiver finds the prefill server that holds the room and introduces itself; layouts and
   transfer engines are compared there, once per connection.
4. When D has reserved pages it calls `receiver.request(...)`. That is the credit on which P works:
   the sender goes to `WaitingForInput` and `sender.request` says what is wanted. As soon as both
   legs are there the receiver goes to `WaitingForInput` too.
5. P computes, and calls `sender.send(page_ids, last, metadata)` for each run of complete pages.
   `send` dispatches the gather, so afterwards the pages may be reused. `Transferring`.
6. D's worker threads pull; `receiver.commit()` on the step thread scatters what has arrived and
   acknowledges it; P lets go of exactly that.
7. With the last chunk committed the receiver is at `Success` and `receiver.metadata` is there; with
   its acknowledgement the sender is at `Success`.
8. Whatever goes wrong on either side puts both legs to `Failed` with a reason and an HTTP status
   (`failure`): an abort, a dead peer, a refused layout, a missing other leg, no progress. A failed
   leg holds nothing: its owner only has to free its own pages, and may do so at once.

To write another backend, in this order:

1. `KVBootstrapServer`: where prefill servers are found.
2. `KVManager.start/stop/failure`: threads of its own; none of the methods below may block.
3. `open_sender`, `open_receiver` and `poll`, with `kv_poll.StateMachine` for each leg: legal moves
   only, terminal states sticky.
4. `send`, `commit`: the only two methods that touch pages; both run on the step thread.
5. Failures: every leg ends within a bound whatever the peer does; `abort` tells the peer at once.
   Release exactly once, and let `counters()` show it.
6. Call `on_event` after each change that the scheduler may be waiting for.
"""

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Protocol

import jax

from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import KVMetadata


class KVPages(Protocol):
    """What the control layer needs of an engine's paged pool. Called on the step thread only."""

    def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
        """Copies pages out of the pool.

        Args:
            page_ids: Pages to copy, at least one.

        Returns:
            One array per layer (or per leaf), shape [n, ...] with n >= len(page_ids) (padding at
            the end), dispatched but not necessarily computed.
        """
        ...

    def scatter(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        """Copies pages into the pool, in place.

        Args:
            arrays: As from `gather`: one per layer, shape [n, ...] with n >= len(page_ids).
            page_ids: Where the first len(page_ids) pages go.
        """
        ...

    def specs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        """Returns shape, dtype and sharding of what `gather` of `num_pages` pages yields.

        Thread-safe: also called on worker threads.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TransferFailure:
    """Why a leg failed.

    Attributes:
        reason: For the client and the log: what was wrong, with which value.
        status: HTTP status that fits: 400 for a bad request, 500 for a fault of this software,
            503 for what may work when tried again.
    """

    reason: str
    status: int = 503


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageRequest:
    """What a decode server asks of a prefill server.

    Attributes:
        first_page: Index in the prompt of the first page wanted.
        num_pages: Pages wanted.
        prompt_tokens: Tokens of the prompt as the decode server counts them.
        extra: Further values that the two schedulers agree on.
    """

    first_page: int
    num_pages: int
    prompt_tokens: int
    extra: dict[str, int | float | str | bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferTiming:
    """When a leg did what, in seconds of the monotonic clock; None for what has not happened.

    Attributes:
        opened: The leg was opened.
        ready: `WaitingForInput` was reached.
        first_chunk: `Transferring` was reached.
        finished: A terminal state was reached.
        pull_seconds: Receiver: sum over chunks of the time from announcement to arrival.
        num_bytes: Bytes sent and acknowledged, or received.
        progress: The last progress, as this side or the other has noted it.
    """

    opened: float
    ready: float | None
    first_chunk: float | None
    finished: float | None
    pull_seconds: float
    num_bytes: int
    progress: float


class KVSender(abc.ABC):
    """The prefill leg of one room."""

    room: int

    @abc.abstractmethod
    def poll(self) -> KVPoll:
        """Returns the current state. Cheap; any thread."""

    @property
    def peer(self) -> Hashable:
        """Which decode server the room is with, once that is known; only to be compared.

        Where `send` limits each of them for itself, a room that has to wait need not hold up those
        of others.
        """
        return None

    @property
    @abc.abstractmethod
    def request(self) -> PageRequest | None:
        """What D wants; set from `WaitingForInput` on."""

    @property
    @abc.abstractmethod
    def failure(self) -> TransferFailure | None:
        """Why the state is `Failed`; None in every other state."""

    @property
    @abc.abstractmethod
    def timing(self) -> TransferTiming:
        """When what happened."""

    @abc.abstractmethod
    def send(
        self, page_ids: Sequence[int], *, last: bool, metadata: KVMetadata | None = None
    ) -> bool:
        """Hands over the next pages of the prompt. Step thread only; does not block.

        Args:
            page_ids: P's pages that hold the next pages of the prompt, starting at
                `request.first_page` with the first call. May be empty for the last chunk.
            last: Whether the prompt is complete with these.
            metadata: Required with the last chunk, not allowed before.

        Returns:
            Whether they were taken. If not, too much is published, for `peer` or in all
            (`on_event` is called when that changes: try again then), or the leg has failed, maybe
            just now because these pages cannot be gathered or published: see `poll`. If taken, the
            gather is dispatched and the pages may be reused.

        Raises:
            ValueError: If the pages are more than D asked for, or `last` leaves some out, or the
                metadata is missing or early.
            RuntimeError: If called before `WaitingForInput` or after the last chunk.
        """

    @abc.abstractmethod
    def mark_progress(self) -> None:
        """Records that the request moved on (in P's queue, or by a computed chunk).

        Call it when the request, or the queue it stands in, has moved. Without it, a leg that waits
        for its own scheduler longer than the progress timeout is given up by both sides.
        """

    @abc.abstractmethod
    def abort(self, reason: str, status: int = 503) -> None:
        """Ends the leg and tells D at once. Any thread. No effect after a terminal state."""


class KVReceiver(abc.ABC):
    """The decode leg of one room."""

    room: int

    @abc.abstractmethod
    def poll(self) -> KVPoll:
        """Returns the current state. Cheap; any thread."""

    @property
    @abc.abstractmethod
    def metadata(self) -> KVMetadata | None:
        """What came with the last chunk; set in `Success`."""

    @property
    @abc.abstractmethod
    def failure(self) -> TransferFailure | None:
        """Why the state is `Failed`; None in every other state."""

    @property
    @abc.abstractmethod
    def timing(self) -> TransferTiming:
        """When what happened."""

    @abc.abstractmethod
    def request(
        self,
        page_ids: Sequence[int],
        *,
        prompt_tokens: int,
        first_page: int = 0,
        extra: dict[str, int | float | str | bool] | None = None,
    ) -> None:
        """Asks for the prompt's pages, now that room is reserved for them. Once per receiver.

        Args:
            page_ids: D's reserved pages that take the prompt's pages from `first_page` on, in
                order. Empty if D holds them all; the metadata is then all that travels.
            prompt_tokens: Tokens of the prompt.
            first_page: Index in the prompt of the first page wanted.
            extra: Further values for P's scheduler.

        Raises:
            RuntimeError: If it was called before.
        """

    @abc.abstractmethod
    def commit(self) -> int:
        """Scatters what has arrived into the reserved pages, and acknowledges. Step thread only.

        Returns:
            Chunks taken by this call; none after a terminal state. With `VerifiedPages` their
            check is still under way, and `on_event` is called after it.
        """

    @abc.abstractmethod
    def mark_progress(self) -> None:
        """Records that the request moved on in D's own queue; see `KVSender.mark_progress`."""

    @abc.abstractmethod
    def abort(self, reason: str, status: int = 503) -> None:
        """Ends the leg and tells P at once. Any thread. No effect after a terminal state.

        The reserved pages may be reused when this returns: nothing is written to them except by
        `commit`.
        """


class KVManager(abc.ABC):
    """All transfers of one process. Methods may be called from any thread unless they say not."""

    @abc.abstractmethod
    def start(self) -> None:
        """Opens ports, runs the transfer engine's self-test and starts the threads.

        Raises:
            EngineStartError: If the transfer engine does not work here.
            PortInUseError: If a port is taken.
            InsecureBindError: If a socket would listen beyond loopback without keys.
            OSError: If the name of the bootstrap server to register with (prefill) is unknown.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Fails what is open (the peers are told), withdraws, and ends the threads. Idempotent."""

    @property
    @abc.abstractmethod
    def failure(self) -> str | None:
        """Why transfers can no longer work in this process, or None. For the process's health."""

    @property
    @abc.abstractmethod
    def not_ready(self) -> str | None:
        """Why no peer can reach this process for now, or None. It may change by itself."""

    @abc.abstractmethod
    def open_sender(self, room: int) -> KVSender:
        """Opens the prefill leg of a room. Does not block.

        Args:
            room: The meeting id, 0 <= room < 2**63.

        Returns:
            The leg; already `Failed` if D has given the room up before.

        Raises:
            ValueError: If the room is out of range or its prefill leg is open already.
            RuntimeError: If this process does not prefill, or the manager is not started.
        """

    @abc.abstractmethod
    def open_receiver(self, host: str, port: int, room: int) -> KVReceiver:
        """Opens the decode leg of a room. Does not block; open it before pages are reserved.

        Args:
            host: Name or address of the bootstrap server.
            port: Its port.
            room: The meeting id, 0 <= room < 2**63.

        Returns:
            The leg. An address where nobody answers makes it `Failed` within a second, a name
            within 5 s for looking it up and a second for each of its addresses, four at most.

        Raises:
            ValueError: If room or port is out of range or the room's decode leg is open already.
            RuntimeError: If this process does not decode, or the manager is not started.
        """

    @abc.abstractmethod
    def counters(self) -> dict[str, int]:
        """Returns gauges of what is held now and totals since the start, by name."""


class KVBootstrapServer(abc.ABC):
    """Where decode servers find the prefill server that holds a room."""

    @abc.abstractmethod
    def start(self) -> None:
        """Opens the port and starts to serve.

        Raises:
            PortInUseError: If the port is taken.
            InsecureBindError: If it would listen beyond loopback without keys.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Closes the port. Idempotent."""

    @property
    @abc.abstractmethod
    def port(self) -> int:
        """The port it listens on; differs from the one asked for if that was 0."""

    @property
    @abc.abstractmethod
    def failure(self) -> str | None:
        """Why it has ended, or None."""

    @abc.abstractmethod
    def counters(self) -> dict[str, int]:
        """Returns gauges and totals by name."""
