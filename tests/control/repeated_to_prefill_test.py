# SPDX-License-Identifier: Apache-2.0
"""Messages to a prefill server that come twice, early, late, or are about what is not theirs.

Each is put into a transfer that goes on: it is counted and ignored, the transfer ends well with the
right bytes, and nothing is left over. The decode server is written by hand, the rest is real.
"""

import dataclasses
from collections.abc import Iterator

import jax
import msgspec
import pytest

from kvferry.control.connection import KVSender
from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import (
    Announce,
    CanaryDone,
    Hello,
    HelloWanted,
    Instance,
    KVAbort,
    KVAccept,
    KVChunk,
    KVChunkDone,
    KVFailed,
    KVOpen,
    KVRequest,
    Ping,
    Refused,
    Touched,
)
from kvferry.control.zmq_prefill import PrefillManager
from kvferry.tests.control.hand_peers import (
    DUPLICATE,
    PATIENT,
    STALE,
    TOO_EARLY,
    UNEXPECTED,
    UNKNOWN,
    HandDecode,
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
    """A transfer to a decode server by hand, step by step."""

    STEPS = ("greeted", "opened", "requested", "announced", "acknowledged", "over")

    def __init__(self, both: Pair) -> None:
        manager = both.prefill.manager
        assert isinstance(manager, PrefillManager)
        self.manager, self._both = manager, both
        self.room = next(both.rooms)
        self.transfer_id = 1000 + self.room
        self.owner, self.other = (HandDecode(manager.instance) for _ in range(2))
        self._engine = engine_like(both)
        self._engine.start()
        self.sender: KVSender = manager.open_sender(self.room)
        self._arrived: list[list[jax.Array]] = []

    def close(self) -> None:
        for each in (self.owner, self.other, self._engine):
            each.close()

    def opening(self, **other: int) -> KVOpen:
        values = {"transfer_id": self.transfer_id, "generation": self.manager.instance.generation}
        return KVOpen(room=self.room, **{**values, **other})

    def request(self, **other: int) -> KVRequest:
        transfer_id = other.get("transfer_id", self.transfer_id)
        return KVRequest(
            room=self.room, transfer_id=transfer_id, first_page=0, num_pages=5, prompt_tokens=20
        )

    def done(self, sequence: int, **other: int) -> KVChunkDone:
        values = {"transfer_id": self.transfer_id, **other}
        return KVChunkDone(room=self.room, sequence=sequence, **values)

    def abort(self, **other: int) -> KVAbort:
        values = {"transfer_id": self.transfer_id, "status": 400, **other}
        return KVAbort(room=self.room, reason="given up", **values)

    def canary(self) -> CanaryDone:
        return CanaryDone(canary_key=self.owner.canary_key)

    def step(self, name: str) -> None:
        """Goes one step on."""
        match name:
            case "greeted":
                self.owner.greet()
                self.other.greet()
            case "opened":
                self.owner.send(self.opening())
                self.owner.heard()
            case "requested":
                self.owner.send(self.request())
                self.owner.receive(KVAccept)
                assert self.sender.poll() is KVPoll.WaitingForInput
            case "announced":
                assert self.sender.send([0, 1], last=False)
                self._pull(self.owner.receive(KVChunk))
            case "acknowledged":
                self.owner.send(self.done(0))
                self.owner.heard()
                assert self.manager.counters()["published_chunks"] == 0
            case "over":
                assert self.sender.send([2, 3, 4], last=True, metadata=metadata())
                self._pull(self.owner.receive(KVChunk))
                self.owner.send(self.done(1))
                reaches(self.sender, KVPoll.Success)

    def up_to(self, last: str) -> None:
        """Goes as far as a step."""
        for name in self.STEPS[: self.STEPS.index(last) + 1]:
            self.step(name)

    def _pull(self, chunk: KVChunk) -> None:
        specs = self._both.prefill.pool.specs(chunk.num_pages)
        pull = self._engine.pull(self.manager.instance.engine.address, chunk.key, specs, 10.0)
        assert pull.wait(11.0)
        self._arrived.append([array[: chunk.num_pages] for array in pull.result()])

    def check(self) -> None:
        """Everything has arrived."""
        wanted = [self._both.prefill.pool.pages(pages) for pages in ([0, 1], [2, 3, 4])]
        for ours, theirs in zip(self._arrived, wanted, strict=True):
            for left, right in zip(ours, theirs, strict=True):
                assert (left == right).all()


@pytest.fixture(name="transfer")
def _transfer(both: Pair) -> Iterator[Transfer]:
    made = Transfer(both)
    yield made
    made.close()
    wait_until(lambda: is_baseline(made.manager), what=str(made.manager.counters()))
    assert made.manager.failure is None


def _renamed(transfer: Transfer) -> Instance:
    return msgspec.structs.replace(transfer.owner.instance, instance_id="another")


_TWICE = [
    Intruder("open", "opened", lambda t: t.opening(), DUPLICATE),
    Intruder("open later", "announced", lambda t: t.opening(), DUPLICATE),
    Intruder("request", "requested", lambda t: t.request(), DUPLICATE),
    Intruder("request later", "acknowledged", lambda t: t.request(), DUPLICATE),
    Intruder("chunk done", "acknowledged", lambda t: t.done(0), DUPLICATE),
    Intruder("canary done", "greeted", lambda t: t.canary(), UNEXPECTED),
    Intruder("hello", "greeted", lambda t: Hello(instance=t.owner.instance), DUPLICATE),
    Intruder("hello later", "announced", lambda t: Hello(instance=t.owner.instance), DUPLICATE),
    Intruder("ping", "announced", lambda t: Ping()),
]
_EARLY = [
    Intruder("request", "greeted", lambda t: t.request(), UNKNOWN),
    Intruder("chunk done before open", "greeted", lambda t: t.done(0), UNKNOWN),
    Intruder("chunk done before request", "opened", lambda t: t.done(0), TOO_EARLY),
    Intruder("chunk done before chunk", "requested", lambda t: t.done(0), TOO_EARLY),
    Intruder("chunk done of the next", "announced", lambda t: t.done(1), TOO_EARLY),
]
_LATE = [
    Intruder("request", "over", lambda t: t.request(), UNKNOWN),
    Intruder("chunk done", "over", lambda t: t.done(1), UNKNOWN),
    Intruder("touched", "over", lambda t: Touched(transfer_ids=[t.transfer_id])),
]
_OF_ANOTHER_ID = [
    Intruder("open", "requested", lambda t: t.opening(transfer_id=5), answer=KVFailed),
    Intruder("request", "opened", lambda t: t.request(transfer_id=5), UNKNOWN),
    Intruder("chunk done", "announced", lambda t: t.done(0, transfer_id=5), UNKNOWN),
    Intruder("abort", "announced", lambda t: t.abort(transfer_id=5), UNKNOWN),
    Intruder("touched", "announced", lambda t: Touched(transfer_ids=[5])),
]
_FOR_ANOTHER_PROCESS = [
    Intruder("open before", "greeted", lambda t: t.opening(generation=1), STALE),
    Intruder("open afterwards", "announced", lambda t: t.opening(generation=1 << 52), STALE),
    Intruder("failed", "announced", lambda t: KVFailed(transfer_id=1, reason="", status=503),
             UNEXPECTED),
    Intruder("announce", "announced", lambda t: Announce(instance_id="i", rooms=[1]), UNEXPECTED),
    Intruder("hello as another", "announced", lambda t: Hello(instance=t.other.instance),
             UNEXPECTED),
    Intruder("hello as a new one", "announced", lambda t: Hello(instance=_renamed(t)), UNEXPECTED),
    Intruder("hello of the wrong role", "announced", lambda t: Hello(instance=t.manager.instance),
             answer=Refused),
]  # fmt: skip
_BY_ANOTHER_PEER = [
    Intruder("open", "opened", lambda t: t.opening(), DUPLICATE, by_other=True),
    Intruder("request", "opened", lambda t: t.request(), UNKNOWN, by_other=True),
    Intruder("chunk done", "announced", lambda t: t.done(0), UNKNOWN, by_other=True),
    Intruder("abort", "announced", lambda t: t.abort(), UNKNOWN, by_other=True),
    Intruder("canary done", "greeted", lambda t: t.canary(), UNEXPECTED, by_other=True),
    Intruder("touched", "announced", lambda t: Touched(transfer_ids=[t.transfer_id]),
             by_other=True),
]  # fmt: skip
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
            intruder.disturb(transfer, transfer.sender)
    transfer.check()


@pytest.mark.parametrize("last", Transfer.STEPS[1:-1])
def test_an_abort_twice(transfer: Transfer, last: str) -> None:
    transfer.up_to(last)
    failed = transfer.manager.counters()["transfers_failed"]
    for _ in range(2):
        transfer.owner.send(transfer.abort())
    transfer.owner.heard()
    assert "given up" in fails(transfer.sender, 1.0)
    assert transfer.manager.counters()["transfers_failed"] == failed + 1
    assert not [each for each in transfer.owner.messages if isinstance(each, KVFailed)]


def test_an_abort_after_the_end(transfer: Transfer) -> None:
    transfer.up_to("over")
    transfer.owner.send(transfer.abort())
    transfer.owner.heard()
    assert transfer.sender.poll() is KVPoll.Success
    transfer.check()


def test_an_abort_before_the_open(transfer: Transfer) -> None:
    """A decode server may have been refused, or have given up, before it asked for the room."""
    transfer.up_to("greeted")
    transfer.owner.send(transfer.abort())
    assert "given up" in fails(transfer.sender, 1.0)
    transfer.owner.send(transfer.opening())
    transfer.owner.send(transfer.abort())
    transfer.owner.heard()


def test_who_was_not_greeted_is_asked_to(transfer: Transfer) -> None:
    transfer.up_to("greeted")
    stranger = HandDecode(transfer.manager.instance)
    before, peers = ignored(transfer.manager), transfer.manager.counters()["peers"]
    for message in (transfer.opening(), transfer.request(), transfer.done(0)):
        stranger.send(message)
        stranger.receive(HelloWanted)
    assert ignored(transfer.manager, before) == {}
    assert transfer.manager.counters()["peers"] == peers
    stranger.close()
    for name in Transfer.STEPS[1:]:
        transfer.step(name)
    transfer.check()


def test_an_open_after_the_end_is_an_early_one_and_ends_as_such() -> None:
    """A room that is over is forgotten, so this is a room whose request has yet to come."""
    quick = dataclasses.replace(PATIENT, orphan_timeout_seconds=0.5)
    with pair(prefill=quick) as both:
        transfer = Transfer(both)
        transfer.up_to("over")
        transfer.owner.send(transfer.opening())
        transfer.owner.heard()
        assert transfer.manager.counters()["early_rooms"] == 1
        failed = transfer.owner.receive(KVFailed, 3.0)
        assert "no request for room" in failed.reason
        assert is_baseline(transfer.manager)
        transfer.close()
