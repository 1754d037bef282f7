# SPDX-License-Identifier: Apache-2.0
"""Messages of a greeted peer that come twice, early, late, or about nothing known, over the wire.

Each is counted and ignored: the room that is open meanwhile succeeds with the right bytes. Chunks
that contradict their transfer fail that room alone.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import (
    CanaryDone,
    KVAbort,
    KVAccept,
    KVChunk,
    KVChunkDone,
    KVFailed,
    KVOpen,
    KVRequest,
    Leaf,
    Message,
    Touched,
)
from kvferry.tests.control.pairs import (
    PAGE_SHAPE,
    QUICK,
    Pair,
    commit_all,
    fails,
    metadata,
    pair,
    reaches,
    wait_until,
)

_PATIENT = dataclasses.replace(QUICK, orphan_timeout_seconds=30.0, progress_timeout_seconds=30.0)
_FOREIGN = 1 << 52  # An id that no process of this test has made.


@dataclasses.dataclass
class _Wire:
    """A pair whose two servers also say what the test wants, on the connection that they have."""

    both: Pair

    def to_prefill(self, message: Message) -> None:
        """D says something."""
        desk: Any = self.both.decode.manager._desk  # type: ignore[attr-defined]
        (peer,) = desk._peers.values()
        assert self.both.decode.manager.loop.call(lambda: peer.send(message))  # type: ignore[attr-defined]

    def to_decode(self, message: Message) -> None:
        """P says something."""
        desk: Any = self.both.prefill.manager._desk  # type: ignore[attr-defined]
        (peer,) = desk._peers
        self.both.prefill.manager.loop.call(lambda: desk.send(peer, message))  # type: ignore[attr-defined]

    def counts(self, side: str, name: str, number: int = 1) -> None:
        """Waits until a side has ignored so many messages for a reason, and none for another."""
        manager = (self.both.prefill if side == "prefill" else self.both.decode).manager

        def ignored() -> dict[str, int]:
            found = manager.counters().items()
            return {key: value for key, value in found if key.startswith("ignored") and value}

        wait_until(lambda: sum(ignored().values()) >= number)
        assert ignored() == {name: number}


@pytest.fixture(name="wire")
def _wire() -> Iterator[_Wire]:
    with pair(prefill=_PATIENT, decode=_PATIENT) as both:
        both.transfer(1)
        yield _Wire(both)
        wait_until(both.at_baseline, what=str(both.prefill.manager.counters()))


def _chunk(transfer_id: int, **fields: Any) -> KVChunk:
    values: dict[str, Any] = {
        "sequence": 0,
        "key": 5,
        "first_page": 0,
        "num_pages": 1,
        "leaves": [Leaf((1, *PAGE_SHAPE), "uint16")] * 3,
    }
    return KVChunk(transfer_id=transfer_id, **values | fields)


def _finish(sender: Any, receiver: Any, both: Pair) -> None:
    """Moves two pages, and looks at them."""
    reaches(sender, KVPoll.WaitingForInput)
    reaches(receiver, KVPoll.WaitingForInput)
    assert sender.send([3], last=False)
    assert sender.send([4], last=True, metadata=metadata())
    commit_all(receiver)
    reaches(sender, KVPoll.Success)
    both.check([3, 4], both.reserved(2))


_TO_PREFILL: dict[str, tuple[Callable[[Any, Any, int], Message], str]] = {
    "a room is opened twice": (
        lambda sender, receiver, generation: KVOpen(
            room=receiver.room, transfer_id=receiver.transfer_id, generation=generation
        ),
        "ignored_duplicate",
    ),
    "a predecessor of P is meant": (
        lambda sender, receiver, generation: KVOpen(
            room=receiver.room, transfer_id=receiver.transfer_id, generation=generation ^ 1
        ),
        "ignored_stale_generation",
    ),
    "pages are asked for twice": (
        lambda sender, receiver, generation: KVRequest(
            room=receiver.room,
            transfer_id=receiver.transfer_id,
            first_page=1,
            num_pages=1,
            prompt_tokens=8,
        ),
        "ignored_duplicate",
    ),
    "pages are asked for by another attempt": (
        lambda sender, receiver, generation: KVRequest(
            room=receiver.room, transfer_id=_FOREIGN, first_page=0, num_pages=1, prompt_tokens=8
        ),
        "ignored_unknown_transfer",
    ),
    "pages of an unknown room are asked for": (
        lambda sender, receiver, generation: KVRequest(
            room=999, transfer_id=_FOREIGN, first_page=0, num_pages=1, prompt_tokens=8
        ),
        "ignored_unknown_transfer",
    ),
    "a chunk is acknowledged before it is sent": (
        lambda sender, receiver, generation: KVChunkDone(
            transfer_id=receiver.transfer_id, room=receiver.room, sequence=0
        ),
        "ignored_early",
    ),
    "a chunk of another attempt is acknowledged": (
        lambda sender, receiver, generation: KVChunkDone(
            transfer_id=_FOREIGN, room=receiver.room, sequence=0
        ),
        "ignored_unknown_transfer",
    ),
    "another attempt is aborted": (
        lambda sender, receiver, generation: KVAbort(
            room=receiver.room, transfer_id=_FOREIGN, reason="no", status=503
        ),
        "ignored_unknown_transfer",
    ),
    "test arrays that were never sent have arrived": (
        lambda sender, receiver, generation: CanaryDone(canary_key=_FOREIGN),
        "ignored_unexpected",
    ),
    "a message that only P sends": (
        lambda sender, receiver, generation: KVAccept(transfer_id=receiver.transfer_id),
        "ignored_unexpected",
    ),
}


@pytest.mark.parametrize("case", list(_TO_PREFILL))
def test_what_prefill_ignores(wire: _Wire, case: str) -> None:
    make, name = _TO_PREFILL[case]
    sender: Any
    receiver: Any
    sender, receiver = wire.both.ready(2)
    generation = wire.both.prefill.manager.instance.generation  # type: ignore[attr-defined]
    wire.to_prefill(make(sender, receiver, generation))
    wire.counts("prefill", name)
    _finish(sender, receiver, wire.both)


def test_prefill_ignores_what_comes_again_or_late(wire: _Wire) -> None:
    sender: Any
    receiver: Any
    sender, receiver = wire.both.ready(2)
    assert sender.send([3], last=False)
    wait_until(receiver.commit)
    wait_until(lambda: wire.both.prefill.manager.counters()["published_chunks"] == 0)
    done = KVChunkDone(transfer_id=receiver.transfer_id, room=receiver.room, sequence=0)
    wire.to_prefill(done)
    wire.counts("prefill", "ignored_duplicate")
    assert sender.send([4], last=True, metadata=metadata())
    commit_all(receiver)
    reaches(sender, KVPoll.Success)
    wire.to_prefill(done)
    wire.to_prefill(Touched(transfer_ids=[receiver.transfer_id, _FOREIGN]))
    wait_until(lambda: wire.both.prefill.manager.counters().get("ignored_unknown_transfer", 0) == 1)


_TO_DECODE: dict[str, tuple[Callable[[Any], Message], str]] = {
    "accepted before pages are asked for": (
        lambda receiver: KVAccept(transfer_id=receiver.transfer_id),
        "ignored_early",
    ),
    "a chunk before pages are asked for": (
        lambda receiver: _chunk(receiver.transfer_id),
        "ignored_early",
    ),
    "a last chunk before pages are asked for": (
        lambda receiver: _chunk(
            receiver.transfer_id, last=True, metadata=metadata(), num_pages=0, leaves=[]
        ),
        "ignored_early",
    ),
    "accepted for another process": (
        lambda receiver: KVAccept(transfer_id=_FOREIGN),
        "ignored_stale_generation",
    ),
    "a chunk for another process": (
        lambda receiver: _chunk(_FOREIGN),
        "ignored_stale_generation",
    ),
    "the failure of another process's room": (
        lambda receiver: KVFailed(transfer_id=_FOREIGN, reason="no", status=503),
        "ignored_stale_generation",
    ),
    "progress of another process's room": (
        lambda receiver: Touched(transfer_ids=[_FOREIGN]),
        "ignored_stale_generation",
    ),
    "a message that only D sends": (
        lambda receiver: KVChunkDone(
            transfer_id=receiver.transfer_id, room=receiver.room, sequence=0
        ),
        "ignored_unexpected",
    ),
}


@pytest.mark.parametrize("case", list(_TO_DECODE))
def test_what_decode_ignores(wire: _Wire, case: str) -> None:
    make, name = _TO_DECODE[case]
    sender, receiver = wire.both.open(2, request=False)
    wait_until(lambda: getattr(receiver, "peer", None) is not None)
    wire.to_decode(make(receiver))
    wire.counts("decode", name)
    receiver.request(wire.both.reserved(2), prompt_tokens=8)
    _finish(sender, receiver, wire.both)


def test_decode_ignores_a_chunk_before_its_request_is_accepted(wire: _Wire) -> None:
    receiver: Any = wire.both.receiver(next(wire.both.rooms))
    receiver.request(wire.both.reserved(2), prompt_tokens=8)
    wait_until(lambda: wire.both.prefill.manager.counters()["early_rooms"] == 1)
    wire.to_decode(_chunk(receiver.transfer_id))
    wire.counts("decode", "ignored_early")
    sender = wire.both.prefill.manager.open_sender(receiver.room)
    _finish(sender, receiver, wire.both)


def test_decode_ignores_what_comes_again_or_late(wire: _Wire) -> None:
    sender: Any
    receiver: Any
    sender, receiver = wire.both.ready(2)
    wire.to_decode(KVAccept(transfer_id=receiver.transfer_id))
    wire.counts("decode", "ignored_duplicate")
    assert sender.send([3], last=False)
    wait_until(receiver.commit)
    wire.to_decode(_chunk(receiver.transfer_id))
    wire.counts("decode", "ignored_duplicate", 2)
    assert sender.send([4], last=True, metadata=metadata())
    commit_all(receiver)
    reaches(sender, KVPoll.Success)
    wire.to_decode(_chunk(receiver.transfer_id, sequence=2, first_page=2))
    wait_until(lambda: wire.both.decode.manager.counters().get("ignored_unknown_transfer", 0) == 1)
    wire.both.check([3, 4], wire.both.reserved(2))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sequence": 2}, "chunk 2 instead of 1"),
        ({"first_page": 2}, "pages from 2 on instead of 1"),
        ({"num_pages": 3}, "pages up to 4 where 3 were wanted"),
        ({"last": True, "metadata": metadata()}, "pages up to 2 where 3 were wanted in all"),
        ({"num_pages": 0}, "chunk 1 without pages"),
        ({"metadata": metadata()}, "metadata before the last chunk"),
        ({"num_pages": 2, "last": True}, "a last chunk without metadata"),
    ],
)
def test_a_chunk_that_contradicts_its_transfer_fails_it_at_once(
    wire: _Wire, fields: dict[str, Any], reason: str
) -> None:
    """What is missing cannot come any more; the other rooms of the same peer go on."""
    sender: Any
    receiver: Any
    sender, receiver = wire.both.ready(3)
    assert sender.send([3], last=False)
    wait_until(receiver.commit)
    first = _chunk(receiver.transfer_id, sequence=1, first_page=1)
    wire.to_decode(msgspec.structs.replace(first, **fields))
    assert f"the prefill server sent {reason}" in fails(receiver, 1.0)
    assert reason in fails(sender, 1.0)
    assert receiver.failure.status == sender.failure.status == 500
    wire.both.transfer(2)
