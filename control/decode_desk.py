# SPDX-License-Identifier: Apache-2.0
"""Where a decode server talks to prefill servers. Control loop's thread only, but for pulls.

What is doubled, early (before the room has asked for pages and was accepted), or about a transfer
that is unknown or over is counted and ignored: it says nothing about a room. A chunk that
contradicts an accepted transfer (a gap, pages that were not asked for) fails that room, and only
that: connections keep the order, so what is missing cannot come any more, and both sides had better
hear of it now than after the progress timeout.
"""

import collections
import time
from collections.abc import Iterable, Sequence

from kvferry.control.connection import PageRequest, TransferFailure
from kvferry.control.decode_rooms import Arrived, DecodeRooms, Receiver
from kvferry.control.discovery import Discovery
from kvferry.control.engines.base import Pull, TransferError, TransferTimeoutError
from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import (
    Instance,
    KVAbort,
    KVAccept,
    KVChunk,
    KVFailed,
    KVOpen,
    KVRequest,
    Leaf,
    Message,
    Touched,
)
from kvferry.control.peer import PeerContext, PrefillPeer

_PULL_POLL_SECONDS = 0.05
# A backstop only: a pull that brings nothing ends long before.
_PULL_SECONDS = 3600.0
_GRACE_SECONDS = 0.1


class DecodeDesk:
    """The prefill servers of a decode server, and what is said about each room.

    Args:
        manager: Whose rooms they are.
    """

    def __init__(self, manager: DecodeRooms) -> None:
        self._manager = manager
        self._discovery = Discovery(
            manager.loop, manager.tally, manager.channel_options, manager.resolver
        )
        self._peers: dict[str, PrefillPeer] = {}  # By instance id.
        self._found_at: dict[str, tuple[str, int]] = {}  # Likewise: the bootstrap server, lately.

    @property
    def num_peers(self) -> int:
        """Prefill servers that are connected or being connected."""
        return len(self._peers)

    def close(self) -> None:
        """Disconnects from bootstrap and prefill servers."""
        self._discovery.close()
        for peer in list(self._peers.values()):
            peer.close()
        self._peers.clear()

    def send_request(self, receiver: Receiver) -> None:
        """Sends the request for pages, once there is one and the prefill server is known."""
        wanted, peer = receiver.wanted, receiver.peer
        if peer is None or wanted is None or receiver.request_sent or receiver.poll().terminal:
            return
        receiver.request_sent = True
        self._must_send(
            receiver,
            peer,
            KVRequest(
                room=receiver.room,
                transfer_id=receiver.transfer_id,
                first_page=wanted.first_page,
                num_pages=wanted.num_pages,
                prompt_tokens=wanted.prompt_tokens,
                extra=wanted.extra,
            ),
        )

    def find(self, receiver: Receiver, host: str, port: int) -> None:
        """Starts to look for the prefill server that holds the receiver's room.

        Also for a receiver that has failed already: then only to tell that server.
        """
        bootstrap = (host, port)
        self._discovery.find(
            host,
            port,
            receiver.room,
            lambda instance: self._found(receiver, instance, bootstrap),
            lambda reason: self._missing(receiver, reason, bootstrap),
        )

    def _missing(self, receiver: Receiver, reason: str, bootstrap: tuple[str, int]) -> None:
        self._manager.fail(receiver, TransferFailure(reason, 503), tell=False)
        # Nobody says who holds the room. It may be one of those that were found there before.
        for peer in list(self._peers.values()):
            if peer.ready and self._found_at.get(peer.instance.instance_id) == bootstrap:
                self._tell_failed(receiver, peer)

    def _found(self, receiver: Receiver, instance: Instance, bootstrap: tuple[str, int]) -> None:
        self._found_at[instance.instance_id] = bootstrap
        peer = self._peers.get(instance.instance_id)
        if peer is None:
            context = PeerContext(
                loop=self._manager.loop,
                tally=self._manager.tally,
                options=self._manager.channel_options,
                local=self._manager.instance,
                engine=self._manager.engine,
                workers=self._manager.workers,
            )
            peer = PrefillPeer(context, instance, self._on_message, self._on_peer_down)
            self._peers[instance.instance_id] = peer
            peer.open()
        found = peer
        peer.when_ready(
            lambda: self._join(receiver, found),
            lambda failure: self._not_joined(receiver, found, failure),
        )

    def _join(self, receiver: Receiver, peer: PrefillPeer) -> None:
        receiver.peer = peer
        if receiver.poll() is KVPoll.Failed:
            self.send_abort(receiver)  # Aborted while P was being looked for.
            return
        opening = KVOpen(
            room=receiver.room,
            transfer_id=receiver.transfer_id,
            generation=peer.instance.generation,
        )
        self._must_send(receiver, peer, opening)
        self.send_request(receiver)

    def _not_joined(self, receiver: Receiver, peer: PrefillPeer, failure: TransferFailure) -> None:
        # The prefill leg would otherwise wait for a decode server that never comes.
        self._manager.fail(receiver, failure, tell=False)
        receiver.peer = peer
        self.send_abort(receiver)

    def send_abort(self, receiver: Receiver) -> None:
        """Tells the prefill server, if it is known yet, that the receiver has failed."""
        if receiver.peer is not None:
            self._tell_failed(receiver, receiver.peer)

    def _tell_failed(self, receiver: Receiver, peer: PrefillPeer) -> None:
        failure = receiver.failure
        if failure is not None:
            peer.send(
                KVAbort(
                    room=receiver.room,
                    transfer_id=receiver.transfer_id,
                    reason=failure.reason,
                    status=failure.status,
                )
            )

    def send_all(self, receiver: Receiver, messages: Sequence[Message]) -> None:
        """Sends acknowledgements; without a connection P has given the room up anyway."""
        for message in messages:
            if receiver.peer is not None:
                receiver.peer.send(message)

    def send_touched(self, receivers: Iterable[Receiver]) -> None:
        """Tells prefill servers which receivers have made progress since the last time."""
        touched: dict[PrefillPeer, list[int]] = collections.defaultdict(list)
        for receiver in receivers:
            if receiver.touched and receiver.peer is not None:
                receiver.touched = False
                touched[receiver.peer].append(receiver.transfer_id)
        for peer, transfer_ids in touched.items():
            peer.send(Touched(transfer_ids=transfer_ids))

    def _fail_soon(self, receiver: Receiver, failure: TransferFailure) -> None:
        # A pull mostly breaks off because P has given up; its own reason is on the way then.
        self._manager.loop.call_later(_GRACE_SECONDS, lambda: self._manager.fail(receiver, failure))

    def _must_send(self, receiver: Receiver, peer: PrefillPeer, message: Message) -> None:
        if not peer.send(message):
            reason = f"room {receiver.room}: the prefill server takes no messages"
            self._manager.fail(receiver, TransferFailure(reason, 503), tell=False)

    def _on_peer_down(self, peer: PrefillPeer, failure: TransferFailure) -> None:
        if self._peers.get(peer.instance.instance_id) is peer:
            del self._peers[peer.instance.instance_id]
            self._found_at.pop(peer.instance.instance_id, None)
        self._manager.engine.disconnect(peer.instance.engine.address)
        with self._manager.lock:
            bound = [each for each in self._manager.receivers.values() if each.peer is peer]
        for receiver in bound:
            self._manager.fail(receiver, failure, tell=False)

    def _on_message(self, peer: PrefillPeer, message: Message) -> None:
        match message:
            case KVAccept(transfer_id=transfer_id):
                receiver = self._receiver(peer, transfer_id)
                if receiver is not None:
                    self._accepted(receiver)
            case KVChunk(transfer_id=transfer_id):
                receiver = self._receiver(peer, transfer_id)
                if receiver is not None:
                    self._on_chunk(receiver, peer, message)
            case KVFailed(transfer_id=transfer_id, reason=reason, status=status):
                receiver = self._receiver(peer, transfer_id)
                if receiver is not None:
                    failure = TransferFailure(f"prefill server: {reason}", status)
                    self._manager.fail(receiver, failure, tell=False)
            case Touched(transfer_ids=transfer_ids):
                for transfer_id in transfer_ids:
                    receiver = self._receiver(peer, transfer_id)
                    if receiver is not None:
                        receiver.machine.touch()
            case _:
                self._manager.tally.add("ignored_unexpected")

    def _receiver(self, peer: PrefillPeer, transfer_id: int) -> Receiver | None:
        receiver = self._manager.receivers.get(transfer_id)
        if receiver is None or receiver.peer is not peer:
            ours = self._manager.ids.owns(transfer_id)
            self._manager.tally.add(
                "ignored_unknown_transfer" if ours else "ignored_stale_generation"
            )
            return None
        return receiver

    def _accepted(self, receiver: Receiver) -> None:
        with self._manager.lock:
            fresh = receiver.poll() is KVPoll.Bootstrapping and receiver.wanted is not None
            if fresh:
                receiver.machine.advance(KVPoll.WaitingForInput)
        if fresh:
            self._manager.on_event()
        else:
            early = receiver.wanted is None
            self._manager.tally.add("ignored_early" if early else "ignored_duplicate")

    def _on_chunk(self, receiver: Receiver, peer: PrefillPeer, chunk: KVChunk) -> None:
        if chunk.sequence < receiver.next_sequence:
            self._manager.tally.add("ignored_duplicate")
            return
        wanted = receiver.wanted
        if wanted is None or receiver.poll() is KVPoll.Bootstrapping:
            self._manager.tally.add("ignored_early")
            return
        problem = _chunk_problem(receiver, wanted, chunk)
        if problem:
            reason = f"room {receiver.room}: the prefill server sent {problem}"
            self._manager.fail(receiver, TransferFailure(reason, 500))
            return
        with self._manager.lock:
            if receiver.machine.state.terminal:
                return
            receiver.machine.advance(KVPoll.Transferring)
            receiver.machine.touch()
            receiver.next_sequence += 1
            receiver.next_page += chunk.num_pages
            if chunk.last:
                receiver.last_sequence = chunk.sequence
            if not chunk.num_pages:
                receiver.arrived[chunk.sequence] = Arrived(chunk, [], 0)
        if not chunk.num_pages:
            self._manager.on_event()
            return
        started = time.monotonic()
        address = peer.instance.engine.address
        self._manager.submit(
            receiver, "the pull", lambda: self._pull(receiver, address, chunk, started)
        )

    def _pull(self, receiver: Receiver, address: str, chunk: KVChunk, started: float) -> None:
        # On a worker thread.
        if receiver.poll().terminal:
            return
        specs = self._manager.pages.specs(chunk.num_pages)
        expected = [Leaf(tuple(spec.shape), str(spec.dtype)) for spec in specs]
        if expected != chunk.leaves:
            reason = (
                f"room {receiver.room}: the prefill server published {_brief(chunk.leaves)}, this"
                f" server's pages are {_brief(expected)}"
            )
            self._manager.fail(receiver, TransferFailure(reason, 500))
            return
        try:
            pull = self._manager.engine.pull(address, chunk.key, specs, _PULL_SECONDS)
            if not self._wait(pull, receiver):
                return
            arrays = pull.result()
        except TransferError as error:
            failure = TransferFailure(f"room {receiver.room}: {error}", 503)
            self._manager.loop.post(lambda: self._fail_soon(receiver, failure))
            return
        num_bytes = sum(array.nbytes for array in arrays)
        with self._manager.lock:
            if receiver.machine.state.terminal:
                return
            receiver.machine.touch()
            receiver.pull_seconds += time.monotonic() - started
            receiver.arrived[chunk.sequence] = Arrived(chunk, arrays, num_bytes)
        self._manager.on_event()

    def _wait(self, pull: Pull, receiver: Receiver) -> bool:
        """Waits for a pull as long as data arrives; returns False if its room has ended.

        Raises:
            TransferTimeoutError: If nothing arrives for the pull timeout.
        """
        limit = self._manager.options.pull_timeout_seconds
        progress, since = pull.progress, time.monotonic()
        while not pull.wait(_PULL_POLL_SECONDS):
            if receiver.poll().terminal:
                pull.cancel()
                return False
            if pull.progress != progress:
                progress, since = pull.progress, time.monotonic()
                receiver.mark_progress()
            elif time.monotonic() - since > limit:
                pull.cancel()
                raise TransferTimeoutError(f"the pull has brought nothing for {limit:g} s")
        return True


def _chunk_problem(receiver: Receiver, wanted: PageRequest, chunk: KVChunk) -> str:
    """Returns what is wrong with a chunk's place in its transfer, or an empty text."""
    if receiver.last_sequence is not None:
        return f"chunk {chunk.sequence} after the last one"
    if chunk.sequence != receiver.next_sequence:
        return f"chunk {chunk.sequence} instead of {receiver.next_sequence}"
    if chunk.first_page != receiver.next_page:
        return f"pages from {chunk.first_page} on instead of {receiver.next_page}"
    end, wanted_end = chunk.first_page + chunk.num_pages, wanted.first_page + wanted.num_pages
    if end > wanted_end or (chunk.last and end != wanted_end):
        return f"pages up to {end} where {wanted_end} were wanted{' in all' if chunk.last else ''}"
    if not chunk.num_pages and not chunk.last:
        return f"chunk {chunk.sequence} without pages"
    if chunk.last != (chunk.metadata is not None):
        return "a last chunk without metadata" if chunk.last else "metadata before the last chunk"
    return ""


def _brief(leaves: Sequence[Leaf]) -> str:
    kinds = collections.Counter(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "nothing"
