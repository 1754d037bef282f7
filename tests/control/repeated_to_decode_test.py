# SPDX-License-Identifier: Apache-2.0
"""Messages to a decode server that come twice, early, late, or are about what is not theirs.

Each is put into a transfer that goes on: it is counted and ignored, the transfer ends well with the
right bytes, and nothing is left over. The prefill server is written by hand, the rest is real.
"""

from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvferry.control.connection import KVReceiver
from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import (
    Heartbeat,
    KVAbort,
    KVAccept,
    KVChunk,
    KVChunkDone,
    KVFailed,
    KVOpen,
    KVRequest,
    Ping,
    Touched,
)
from kvferry.control.zmq_decode import DecodeManager
from kvferry.tests.control.hand_peers import (
    DUPLICATE,
    PATIENT,
    STALE,
    TOO_EARLY,
    UNEXPECTED,
    UNKNOWN,
    HandPrefill,
    Intruder,
    by_name,
    engine_like,
    ignored,
)
from kvferry.tests.control.pairs import (
    Pair,
    fails,
    is_baseline,
    metadata,
    pair,
    reaches,
    wait_until,
)


@pytest.fixture(name="both", scope="module", params=["fake", "tcp"])
def _both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(request.param, prefill=PATIENT, decode=PATIENT) as made:
        yield made


class Transfer:
    """A transfer from a prefill server by hand, step by step."""

    STEPS = ("opened", "requested", "accepted", "committed", "over")

    def __init__(self, both: Pair) -> None:
        manager = both.decode.manager
        assert isinstance(manager, DecodeManager)
        self.manager, self._both = manager, both
        self.owner, self.other = (
            HandPrefill(manager.instance, engine_like(both), both.prefill.pool) for _ in range(2)
        )
        self._elsewhere = self._open(self.other)
        self.receiver: KVReceiver = self._open(self.owner)
        self.transfer_id = self.owner.receive(KVOpen).transfer_id

    def _open(self, prefill: HandPrefill) -> KVReceiver:
        room = next(self._both.rooms)
        receiver = self.manager.open_receiver("127.0.0.1", prefill.port, room)
        prefill.pump_until(lambda: any(isinstance(each, KVOpen) for each in prefill.messages))
        return receiver

    def close(self) -> None:
        self._elsewhere.abort("not needed any more")
        for each in (self.owner, self.other):
            each.close()

    def accept(self, flipped: int = 0) -> KVAccept:
        return KVAccept(transfer_id=self.transfer_id ^ flipped)

    def first(self, flipped: int = 0) -> KVChunk:
        """The first chunk; with bits of its transfer id flipped, that of another transfer."""
        return self.owner.chunk(self.transfer_id ^ flipped, 0, 0, [0, 1])

    def last(self) -> KVChunk:
        return self.owner.chunk(self.transfer_id, 1, 2, [2, 3, 4], metadata())

    def failed(self, flipped: int = 0) -> KVFailed:
        return KVFailed(transfer_id=self.transfer_id ^ flipped, reason="given up", status=400)

    def touched(self, flipped: int = 0) -> Touched:
        return Touched(transfer_ids=[self.transfer_id ^ flipped])

    def step(self, name: str) -> None:
        """Goes one step on."""
        match name:
            case "requested":
                self.receiver.request(self._both.reserved(5), prompt_tokens=20)
                self.owner.receive(KVRequest)
            case "accepted":
                self.owner.send(self.accept())
                reaches(self.receiver, KVPoll.WaitingForInput)
            case "committed":
                self.owner.send(self.first())
                wait_until(self.receiver.commit)
                assert self.owner.receive(KVChunkDone).sequence == 0
            case "over":
                self.owner.send(self.last())
                wait_until(self.receiver.commit)
                assert self.owner.receive(KVChunkDone).sequence == 1

    def check(self) -> None:
        """Everything has arrived."""
        assert self.receiver.poll() is KVPoll.Success and self.receiver.metadata == metadata()
        self._both.check([0, 1, 2, 3, 4], self._both.reserved(5))


@pytest.fixture(name="transfer")
def _transfer(both: Pair) -> Iterator[Transfer]:
    made = Transfer(both)
    yield made
    made.close()
    wait_until(lambda: is_baseline(made.manager), what=str(made.manager.counters()))
    wait_until(lambda: made.manager.counters()["peers"] == 0)
    assert made.manager.failure is None


_OTHER_ID, _OTHER_GENERATION = 1, 1 << 52
_TWICE = [
    Intruder("accept", "accepted", lambda t: t.accept(), DUPLICATE),
    Intruder("accept later", "committed", lambda t: t.accept(), DUPLICATE),
    Intruder("chunk", "committed", lambda t: t.first(), DUPLICATE),
    Intruder("welcome", "opened", lambda t: t.owner.welcome(), UNEXPECTED),
    Intruder("ping", "committed", lambda t: Ping()),
]
_EARLY = [
    Intruder("accept", "opened", lambda t: t.accept(), TOO_EARLY),
    Intruder("chunk before request", "opened", lambda t: t.first(), TOO_EARLY),
    Intruder("chunk before accept", "requested", lambda t: t.first(), TOO_EARLY),
]
_LATE = [
    Intruder("accept", "over", lambda t: t.accept(), UNKNOWN),
    Intruder("chunk", "over", lambda t: t.last(), UNKNOWN),
    Intruder("failed", "over", lambda t: t.failed(), UNKNOWN),
    Intruder("touched", "over", lambda t: t.touched(), UNKNOWN),
]
_OF_ANOTHER_ID = [
    Intruder("accept", "requested", lambda t: t.accept(_OTHER_ID), UNKNOWN),
    Intruder("chunk", "accepted", lambda t: t.first(_OTHER_ID), UNKNOWN),
    Intruder("failed", "accepted", lambda t: t.failed(_OTHER_ID), UNKNOWN),
    Intruder("touched", "accepted", lambda t: t.touched(_OTHER_ID), UNKNOWN),
]
_FOR_ANOTHER_PROCESS = [
    Intruder("accept", "requested", lambda t: t.accept(_OTHER_GENERATION), STALE),
    Intruder("chunk", "accepted", lambda t: t.first(_OTHER_GENERATION), STALE),
    Intruder("failed", "accepted", lambda t: t.failed(_OTHER_GENERATION), STALE),
    Intruder("touched", "accepted", lambda t: t.touched(_OTHER_GENERATION), STALE),
    Intruder("chunk done", "accepted", lambda t: KVChunkDone(transfer_id=1, room=1, sequence=0),
             UNEXPECTED),
    Intruder("abort", "accepted", lambda t: KVAbort(room=1, transfer_id=1, reason="", status=400),
             UNEXPECTED),
    Intruder("heartbeat", "accepted", lambda t: Heartbeat(instance_id="i", generation=1),
             UNEXPECTED),
]  # fmt: skip
_BY_ANOTHER_PEER = [
    Intruder("accept", "requested", lambda t: t.accept(), UNKNOWN, by_other=True),
    Intruder("chunk", "accepted", lambda t: t.first(), UNKNOWN, by_other=True),
    Intruder("failed", "accepted", lambda t: t.failed(), UNKNOWN, by_other=True),
    Intruder("touched", "accepted", lambda t: t.touched(), UNKNOWN, by_other=True),
]
_ALL = by_name(
    {
        "twice": _TWICE,
        "early": _EARLY,
        "late": _LATE,
        "of another id": _OF_ANOTHER_ID,
        "for another process": _FOR_ANOTHER_PROCESS,
        "by another peer": _BY_ANOTHER_PEER,
    }
)


@pytest.mark.parametrize("intruder", _ALL.values(), ids=_ALL)
def test_it_is_counted_and_ignored(transfer: Transfer, intruder: Intruder) -> None:
    for name in Transfer.STEPS:
        transfer.step(name)
        if name == intruder.after:
            intruder.disturb(transfer, transfer.receiver)
            assert not transfer.receiver.commit()
    transfer.check()


@pytest.mark.parametrize("last", Transfer.STEPS[:-1])
def test_a_failure_twice(transfer: Transfer, last: str) -> None:
    for name in Transfer.STEPS[: Transfer.STEPS.index(last) + 1]:
        transfer.step(name)
    before = ignored(transfer.manager)
    failed = transfer.manager.counters()["transfers_failed"]
    for _ in range(2):
        transfer.owner.send(transfer.failed())
    transfer.owner.heard()
    assert "given up" in fails(transfer.receiver, 1.0)
    assert ignored(transfer.manager, before) == {"ignored_unknown_transfer": 1}
    assert transfer.manager.counters()["transfers_failed"] == failed + 1
    assert not [each for each in transfer.owner.messages if isinstance(each, KVAbort)]


_OUT_OF_PLACE: dict[str, tuple[str, Callable[[Transfer], KVChunk], str]] = {
    "with a gap before it": ("accepted", lambda t: t.last(), "chunk 1 instead of 0"),
    "of other pages": (
        "committed",
        lambda t: t.owner.chunk(t.transfer_id, 1, 3, [3, 4], metadata()),
        "pages from 3 on instead of 2",
    ),
    "of too many pages": (
        "committed",
        lambda t: t.owner.chunk(t.transfer_id, 1, 2, [2, 3, 4, 5], metadata()),
        "pages up to 6 where 5 were wanted",
    ),
    "of too few pages": (
        "committed",
        lambda t: t.owner.chunk(t.transfer_id, 1, 2, [2, 3], metadata()),
        "pages up to 4 where 5 were wanted in all",
    ),
    "without pages": (
        "committed",
        lambda t: t.owner.chunk(t.transfer_id, 1, 2, []),
        "chunk 1 without pages",
    ),
    "with metadata before the last": (
        "committed",
        lambda t: msgspec.structs.replace(t.last(), last=False),
        "metadata before the last chunk",
    ),
    "without metadata although the last": (
        "committed",
        lambda t: msgspec.structs.replace(t.last(), metadata=None),
        "a last chunk without metadata",
    ),
}


@pytest.mark.parametrize("case", _OUT_OF_PLACE.values(), ids=_OUT_OF_PLACE)
def test_a_chunk_out_of_place_ends_its_transfer(
    transfer: Transfer, case: tuple[str, Callable[[Transfer], KVChunk], str]
) -> None:
    """Messages arrive in order, so the peer has lost count; and its next chunk would be wrong."""
    last, chunk, problem = case
    for name in Transfer.STEPS[: Transfer.STEPS.index(last) + 1]:
        transfer.step(name)
    transfer.owner.send(chunk(transfer))
    told = transfer.owner.receive(KVAbort)
    assert told.transfer_id == transfer.transfer_id and problem in told.reason
    assert problem in fails(transfer.receiver) and not transfer.receiver.commit()
