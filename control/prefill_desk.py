# SPDX-License-Identifier: Apache-2.0
"""Where a prefill server takes the messages of decode servers. Control loop's thread only.

What is doubled, early (an acknowledgement of what was not sent), meant for a predecessor of this
process, or about a transfer that is unknown or over is counted and ignored.
"""

import time

import jax
from absl import logging

from kvferry.control.connection import PageRequest, TransferFailure
from kvferry.control.engines.canary import canary_specs, make_canary
from kvferry.control.kv_layout import LayoutMismatchError
from kvferry.control.messages import (
    CanaryDone,
    Hello,
    HelloWanted,
    Instance,
    KVAbort,
    KVChunkDone,
    KVFailed,
    KVOpen,
    KVRequest,
    Message,
    Refused,
    Touched,
    Welcome,
    clip_reason,
)
from kvferry.control.peer import check_fit
from kvferry.control.prefill_rooms import PUBLISH_ERRORS, DecodeLeg, PrefillRooms, Sender
from kvferry.control.side_channel import ServerChannel

_CANARY_SECONDS = 30.0


class PrefillDesk:
    """The side channel of a prefill server and the decode servers on it.

    Args:
        manager: Whose rooms the messages are about.
    """

    def __init__(self, manager: PrefillRooms) -> None:
        self._manager = manager
        self._channel = ServerChannel(
            manager.loop, manager.tally, manager.channel_options, self._take, self._on_lost
        )
        self._peers: dict[bytes, Instance] = {}
        self._connection_of: dict[str, bytes] = {}
        self._canary_keys: dict[bytes, int] = {}
        self._canary: list[jax.Array] = []

    @property
    def num_peers(self) -> int:
        """Decode servers that are connected and fit."""
        return len(self._peers)

    def open(self, host: str, port: int) -> int:
        """Opens the side channel; returns its port."""
        return self._channel.open(host, port)

    def close(self) -> None:
        """Closes the side channel."""
        self._channel.close()

    def make_canary(self, seed: str) -> None:
        """Makes the test arrays for new peers once, so that a greeting costs no computation."""
        self._canary = make_canary(seed, canary_specs())

    def send(self, peer: bytes, message: Message) -> None:
        """Sends to a decode server. One that cannot be reached any more is given up."""
        if not self._channel.send(peer, message) and peer in self._peers:
            self._drop(peer, "the connection to the decode server is gone")

    def _take(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._greet(peer, message.instance)
        elif isinstance(message, KVAbort):
            # Also from a peer that was refused: its room has no other leg to wait for.
            self._abort(peer, message)
        elif peer not in self._peers:
            # This process has restarted, or has given the peer up. It must not count as a peer
            # only because it speaks.
            self._channel.forget(peer)
            self._channel.send(peer, HelloWanted())
        else:
            self._take_known(peer, message)

    def _take_known(self, peer: bytes, message: Message) -> None:
        match message:
            case KVOpen():
                self._open_leg(peer, message)
            case KVRequest():
                self._request(peer, message)
            case KVChunkDone(room=room, transfer_id=transfer_id, sequence=sequence):
                sender = self._sender(peer, room, transfer_id)
                if sender is None:
                    self._manager.tally.add("ignored_unknown_transfer")
                elif not self._manager.acknowledge(sender, sequence):
                    early = sequence >= sender.next_sequence
                    self._manager.tally.add("ignored_early" if early else "ignored_duplicate")
            case Touched(transfer_ids=transfer_ids):
                self._touch(peer, set(transfer_ids))
            case CanaryDone(canary_key=key):
                if self._canary_keys.get(peer) == key:
                    self._release_canary(peer, delivered=True)
                else:
                    self._manager.tally.add("ignored_unexpected")
            case _:
                self._manager.tally.add("ignored_unexpected")

    def _greet(self, peer: bytes, instance: Instance) -> None:
        try:
            check_fit(self._manager.instance, instance)
        except LayoutMismatchError as error:
            logging.warning("refused a decode server: %s", error)
            self._channel.send(peer, Refused(reason=clip_reason(str(error)), status=500))
            return
        previous = self._connection_of.get(instance.instance_id)
        if peer in self._peers:  # A connection is one decode server for good.
            kind = "ignored_duplicate" if previous == peer else "ignored_unexpected"
            self._manager.tally.add(kind)
            return
        if previous is not None:
            self._drop(previous, "the decode server has connected anew")
        key = self._manager.ids.next_id()
        try:
            self._manager.engine.publish(key, self._canary, _CANARY_SECONDS)
        except PUBLISH_ERRORS as error:
            self._channel.send(peer, Refused(reason=clip_reason(str(error)), status=503))
            return
        self._peers[peer] = instance
        self._connection_of[instance.instance_id] = peer
        self._canary_keys[peer] = key
        self._channel.send(peer, Welcome(instance=self._manager.instance, canary_key=key))

    def _open_leg(self, peer: bytes, message: KVOpen) -> None:
        manager, room = self._manager, message.room
        if message.generation != manager.instance.generation:
            manager.tally.add("ignored_stale_generation")
            return
        leg = DecodeLeg(peer, room, message.transfer_id, time.monotonic())
        limit = manager.options.max_rooms
        with manager.lock:
            sender = manager.senders.get(room)
            present = sender.leg if sender is not None else manager.early.get(room)
            failure = manager.late_decode.take(room)
            if present is not None:
                failure = TransferFailure(f"room {room} has a decode server already", 503)
            elif failure is None and sender is None and len(manager.early) >= limit:
                failure = TransferFailure("too many rooms wait for their prefill request", 503)
            elif failure is None and sender is not None:
                manager.join_locked(sender, leg)
            elif failure is None:
                manager.early[room] = leg
        if present is not None and present.transfer_id == message.transfer_id:
            manager.tally.add("ignored_duplicate")
        elif failure is not None:
            self.send(
                peer,
                KVFailed(
                    transfer_id=message.transfer_id, reason=failure.reason, status=failure.status
                ),
            )

    def _request(self, peer: bytes, message: KVRequest) -> None:
        manager = self._manager
        with manager.lock:
            sender = manager.senders.get(message.room)
            leg = sender.leg if sender is not None else manager.early.get(message.room)
            known = leg is not None and (leg.peer, leg.transfer_id) == (peer, message.transfer_id)
            fresh = leg is not None and known and leg.request is None
            if leg is not None and fresh:
                leg.request = PageRequest(
                    first_page=message.first_page,
                    num_pages=message.num_pages,
                    prompt_tokens=message.prompt_tokens,
                    extra=message.extra,
                )
                if sender is not None:
                    manager.accept_locked(sender, leg)
        if not known:
            manager.tally.add("ignored_unknown_transfer")
        elif not fresh:
            manager.tally.add("ignored_duplicate")
        elif sender is not None:
            manager.on_event()

    def _abort(self, peer: bytes, message: KVAbort) -> None:
        manager, room = self._manager, message.room
        failure = TransferFailure(f"decode server: {message.reason}", message.status)
        with manager.lock:
            sender = manager.senders.get(room)
            leg = sender.leg if sender is not None else manager.early.get(room)
            mine = leg is None or (leg.peer, leg.transfer_id) == (peer, message.transfer_id)
            if mine and sender is None:
                manager.early.pop(room, None)
                manager.late_prefill.put(room, failure)
        if not mine:
            manager.tally.add("ignored_unknown_transfer")
        elif sender is not None:
            manager.fail(sender, failure, tell=False)

    def _touch(self, peer: bytes, transfer_ids: set[int]) -> None:
        manager = self._manager
        with manager.lock:
            for sender in manager.senders.values():
                leg = sender.leg
                if leg is not None and leg.peer == peer and leg.transfer_id in transfer_ids:
                    sender.machine.touch()

    def _sender(self, peer: bytes, room: int, transfer_id: int) -> Sender | None:
        with self._manager.lock:
            sender = self._manager.senders.get(room)
            if sender is None or sender.leg is None:
                return None
            found = (sender.leg.peer, sender.leg.transfer_id)
            return sender if found == (peer, transfer_id) else None

    def _on_lost(self, peer: bytes, why: str) -> None:
        if peer in self._peers:
            self._drop(peer, f"the decode server {why}")
            # If it was only stopped, this is the first that it reads when it goes on.
            self._channel.send(peer, HelloWanted())

    def _drop(self, peer: bytes, reason: str) -> None:
        instance = self._peers.pop(peer)
        if self._connection_of.get(instance.instance_id) == peer:
            del self._connection_of[instance.instance_id]
        self._channel.forget(peer)
        self._release_canary(peer, delivered=False)
        manager, failure = self._manager, TransferFailure(reason, 503)
        with manager.lock:
            bound = [
                sender
                for sender in manager.senders.values()
                if sender.leg is not None and sender.leg.peer == peer
            ]
            for leg in [leg for leg in manager.early.values() if leg.peer == peer]:
                del manager.early[leg.room]
                # A prefill request that still comes must not wait for it.
                manager.late_prefill.put(leg.room, failure)
        for sender in bound:
            manager.fail(sender, failure)

    def _release_canary(self, peer: bytes, *, delivered: bool) -> None:
        key = self._canary_keys.pop(peer, None)
        if key is not None:
            self._manager.engine.release(key, delivered=delivered)
