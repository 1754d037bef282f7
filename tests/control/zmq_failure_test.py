# SPDX-License-Identifier: Apache-2.0
"""How rooms fail: two managers, real sockets, the in-process engine."""

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import msgspec
import pytest

from kvferry.control.connection import KVReceiver
from kvferry.control.engines.base import EngineOptions, Pull, Spec, TransferError
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.kv_poll import KVPoll
from kvferry.tests.control.pairs import (
    LAYOUT,
    QUICK,
    Pair,
    commit_all,
    fails,
    metadata,
    pair,
    reaches,
    wait_until,
)

AT_ONCE = 0.5


@pytest.fixture(name="both")
def _both() -> Iterator[Pair]:
    with pair() as made:
        yield made
        wait_until(made.at_baseline, what=str(made.prefill.manager.counters()))


def test_abort_on_prefill_is_told_at_once(both: Pair) -> None:
    sender, receiver = both.ready()
    sender.abort("the client has left", 499)
    assert sender.poll() is KVPoll.Failed
    reason = fails(receiver, AT_ONCE)
    assert "the client has left" in reason and receiver.failure is not None
    assert receiver.failure.status == 499


def test_abort_on_decode_is_told_at_once(both: Pair) -> None:
    sender, receiver = both.ready()
    receiver.abort("cancelled by /abort_request", 400)
    assert receiver.poll() is KVPoll.Failed
    assert "cancelled by /abort_request" in fails(sender, AT_ONCE)
    assert sender.failure is not None and sender.failure.status == 400


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_with_pages_published_and_pulls_in_flight(both: Pair, side: str) -> None:
    sender, receiver = both.ready()
    both.network.set(held=True)
    assert sender.send([0, 1], last=False)
    wait_until(lambda: receiver.poll() is KVPoll.Transferring)
    assert both.prefill.manager.counters()["published_bytes"] > 0
    (sender if side == "prefill" else receiver).abort("stop")
    assert "stop" in fails(receiver if side == "prefill" else sender, AT_ONCE)
    wait_until(both.at_baseline, AT_ONCE)
    assert receiver.commit() == 0
    assert not both.decode.pool.layers[0].any()  # Nothing was written to the reserved pages.
    both.network.set(held=False)
    both.transfer()


def test_abort_between_arrival_and_commit(both: Pair) -> None:
    sender, receiver = both.ready()
    assert sender.send([0, 1, 2, 3, 4], last=True, metadata=metadata())
    wait_until(lambda: both.decode.manager.counters()["pending_pulls"] == 0)
    receiver.abort("gone")
    assert receiver.commit() == 0 and receiver.poll() is KVPoll.Failed
    fails(sender, AT_ONCE)
    assert not both.decode.pool.layers[0].any()


def test_abort_while_the_prefill_server_is_looked_for(both: Pair) -> None:
    receiver = both.receiver(60)
    receiver.abort("rejected here", 400)
    sender = both.prefill.manager.open_sender(60)
    assert "rejected here" in fails(sender, AT_ONCE)


def test_terminal_states_are_sticky(both: Pair) -> None:
    sender, receiver = both.ready()
    sender.abort("first")
    fails(receiver)
    receiver.abort("second")
    sender.abort("third")
    assert sender.failure is not None and sender.failure.reason == "first"
    assert receiver.failure is not None and "first" in receiver.failure.reason
    sender, receiver = both.ready(1)
    assert sender.send([0], last=True, metadata=metadata())
    commit_all(receiver)
    reaches(sender, KVPoll.Success)
    sender.abort("late")
    receiver.abort("late")
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    assert sender.failure is None and receiver.failure is None
    both.transfer(2)


def test_a_late_decode_leg_of_a_failed_room_fails_at_once(both: Pair) -> None:
    sender = both.prefill.manager.open_sender(70)
    sender.abort("prompt too long", 400)
    # Before, the bootstrap server does not guess who holds a room that nobody announces.
    wait_until(lambda: both.bootstrap.settled)
    receiver = both.receiver(70)
    assert "prompt too long" in fails(receiver, AT_ONCE)
    assert receiver.failure is not None and receiver.failure.status == 400


def test_a_late_prefill_leg_of_a_failed_room_fails_at_once(both: Pair) -> None:
    receiver = both.receiver(71)
    receiver.request([1], prompt_tokens=4)
    wait_until(lambda: both.prefill.manager.counters()["early_rooms"] == 1)
    receiver.abort("gone", 503)
    wait_until(lambda: both.prefill.manager.counters()["early_rooms"] == 0)
    sender = both.prefill.manager.open_sender(71)
    assert sender.poll() is KVPoll.Failed


def test_orphans_of_either_side_end(both: Pair) -> None:
    # Before, a look-up may wait longer than the decode leg does for progress.
    wait_until(lambda: both.bootstrap.settled)
    sender = both.prefill.manager.open_sender(80)
    receiver = both.receiver(81)
    receiver.request([1], prompt_tokens=4)
    assert "no decode server asked for room 80 in 1 s" in fails(sender, 3.0)
    assert "no request for room 81 reached the prefill server in 1 s" in fails(receiver, 3.0)


def test_a_room_without_progress_ends_on_both_sides(both: Pair) -> None:
    sender, receiver = both.ready()
    assert "no progress in 1.5 s" in fails(sender, 5.0)
    assert "no progress" in fails(receiver, AT_ONCE)


def test_a_pull_that_never_arrives_ends(both: Pair) -> None:
    sender, receiver = both.ready(1)
    both.network.set(error="the cable is cut")
    assert sender.send([0], last=True, metadata=metadata())
    assert "the cable is cut" in fails(receiver, AT_ONCE)
    assert "the cable is cut" in fails(sender, AT_ONCE)
    both.network.set(error="")
    both.transfer()


def test_a_pull_lives_as_long_as_data_arrives() -> None:
    quick = dataclasses.replace(QUICK, pull_timeout_seconds=0.3)
    with pair(decode=quick) as both:
        sender, receiver = both.ready(1)
        both.network.set(held=True)
        assert sender.send([0], last=True, metadata=metadata())
        since = time.monotonic()

        def moved() -> bool:
            both.network.progress += 1
            return time.monotonic() - since > 4 * quick.pull_timeout_seconds

        wait_until(moved)
        assert receiver.poll() is KVPoll.Transferring, receiver.failure
        assert "brought nothing for 0.3 s" in fails(receiver, 1.0)
        assert "brought nothing for 0.3 s" in fails(sender, AT_ONCE)
        both.network.set(held=False)
        wait_until(both.at_baseline)
        both.transfer()


def _stays(leg: KVReceiver, state: KVPoll, seconds: float) -> None:
    until = time.monotonic() + seconds

    def over() -> bool:
        assert leg.poll() is state, leg.failure
        return time.monotonic() > until

    wait_until(over)


class _OneByOne(FakeEngine):
    """Lets a pull of pages begin for each permit."""

    def __init__(self, network: FakeNetwork) -> None:
        super().__init__(EngineOptions(), network)
        self.permits = threading.Semaphore(100)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        if specs[0].dtype == "uint16":
            assert self.permits.acquire(timeout=10.0)
        return super().pull(address, key, specs, deadline_seconds)


def test_a_room_lives_as_long_as_those_before_it_move() -> None:
    one = dataclasses.replace(QUICK, pull_workers=1, progress_timeout_seconds=2.0)
    network = FakeNetwork()
    slow = _OneByOne(network)
    with pair(
        prefill=one, decode=one, engines=(FakeEngine(EngineOptions(), network), slow)
    ) as both:
        both.transfer(1)  # The self-test and the test arrays of the first meeting are behind us.
        while slow.permits.acquire(blocking=False):
            pass
        legs = [both.ready(1) for _ in range(5)]
        for sender, _ in legs:
            assert sender.send([0], last=True, metadata=metadata())
        for sender, receiver in legs:
            reaches(receiver, KVPoll.Transferring)
            _stays(receiver, KVPoll.Transferring, 0.6)
            slow.permits.release()
            commit_all(receiver)
            reaches(sender, KVPoll.Success)


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("127.0.0.1", 1, "refused"),
        ("no-such-host.invalid", 9, "cannot be resolved"),
        ("", 9, "cannot be"),
    ],
)
def test_a_wrong_address_fails_in_a_second(both: Pair, host: str, port: int, text: str) -> None:
    receiver = both.decode.manager.open_receiver(host, port, 90)
    assert text in fails(receiver, 1.0)
    assert receiver.failure is not None and receiver.failure.status == 503
    both.transfer()


def test_a_server_that_does_not_answer_fails_in_a_second(both: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        receiver = both.decode.manager.open_receiver("127.0.0.1", mute.getsockname()[1], 91)
        assert "no connection within 0.9 s" in fails(receiver, 1.5)


@pytest.mark.parametrize("field", ["model_fingerprint", "page_buckets"])
def test_layouts_that_differ_are_refused_by_name(field: str) -> None:
    value = {"model_fingerprint": "another model", "page_buckets": (1, 2)}[field]
    with pair(layouts=(LAYOUT, msgspec.structs.replace(LAYOUT, **{field: value}))) as both:
        sender, receiver = both.open()
        reason = fails(receiver, 2.0)
        assert field in reason and repr(value) in reason
        assert repr(getattr(LAYOUT, field)) in reason
        assert receiver.failure is not None and receiver.failure.status == 500
        assert field in fails(sender, AT_ONCE)  # Though the two are not on speaking terms.


def test_engine_settings_that_differ_are_refused_by_name() -> None:
    class Picky(FakeEngine):
        def settings(self) -> dict[str, int | str]:
            return {"channels": self.options.channels}

    network = FakeNetwork()
    engines = (
        Picky(EngineOptions(channels=2), network),
        Picky(EngineOptions(channels=4), network),
    )
    with pair(engines=engines) as both:
        _, receiver = both.open()
        reason = fails(receiver, 2.0)
        assert "channels" in reason and "2" in reason and "4" in reason


def test_a_data_path_that_does_not_work_is_found_before_the_first_room() -> None:
    # Two networks: both engines are healthy, but cannot reach each other.
    engines = (
        FakeEngine(EngineOptions(), FakeNetwork()),
        FakeEngine(EngineOptions(), FakeNetwork()),
    )
    engines[1]._network.new_address()
    with pair(engines=engines) as both:
        engines[1]._network.set(error="no route")
        _, receiver = both.open()
        assert "test arrays did not arrive" in fails(receiver, 2.0)


def test_other_page_shapes_are_refused_by_the_receiver(both: Pair) -> None:
    sender, receiver = both.ready(1)
    both.prefill.pool.layers = [layer.reshape(64, 4, 3, 16) for layer in both.prefill.pool.layers]
    assert sender.send([0], last=True, metadata=metadata())
    assert "published 3 x uint16[1, 4, 3, 16]" in fails(receiver)
    assert "uint16[1, 4, 6, 8]" in fails(sender)


@pytest.mark.parametrize("place", ["gather", "publish"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TransferError("out of slots"), 503),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 503),
        (ValueError("an array is not in the default layout"), 500),
    ],
)
def test_pages_that_cannot_be_published_fail_their_room_only(
    both: Pair, place: str, error: Exception, status: int
) -> None:
    sender, receiver = both.ready(2)
    other, other_receiver = both.ready(1)
    assert sender.send([0], last=False)
    wait_until(receiver.commit)
    owner = both.prefill.pool if place == "gather" else both.prefill.engine
    works = getattr(owner, place)

    def refuse(*unused: object) -> None:
        raise error

    setattr(owner, place, refuse)
    assert not sender.send([1], last=True, metadata=metadata())
    setattr(owner, place, works)
    assert f"cannot publish pages: {error}" in fails(sender)
    assert f"cannot publish pages: {error}" in fails(receiver)
    assert sender.failure is not None and sender.failure.status == status
    assert receiver.failure is not None and receiver.failure.status == status
    wait_until(lambda: both.prefill.manager.counters()["published_bytes"] == 0)
    assert other.send([2], last=True, metadata=metadata())
    commit_all(other_receiver)
    reaches(other, KVPoll.Success)


@pytest.mark.parametrize("error", [TransferError("a"), jax.errors.JaxRuntimeError("a")])
def test_test_arrays_that_cannot_be_published_refuse_that_peer(
    both: Pair, error: Exception
) -> None:
    works = both.prefill.engine.publish

    def refuse(*unused: object) -> None:
        raise type(error)("no memory")

    both.prefill.engine.publish = refuse  # type: ignore[method-assign, assignment]
    sender, receiver = both.open()
    assert "refused this decode server: no memory" in fails(receiver, 2.0)
    assert "no memory" in fails(sender, AT_ONCE)
    both.prefill.engine.publish = works  # type: ignore[method-assign]
    assert both.prefill.manager.failure is None
    both.transfer()


def test_an_unexpected_error_of_a_gather_keeps_no_room(both: Pair) -> None:
    """It is the caller's to see; what was reserved for the pages is free again."""
    sender, receiver = both.ready(1)
    works = both.prefill.pool.gather

    def broken(*unused: object) -> None:
        raise KeyError("a bug")

    both.prefill.pool.gather = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyError, match="a bug"):
        sender.send([0], last=True, metadata=metadata())
    assert both.prefill.manager.counters()["published_bytes"] == 0
    both.prefill.pool.gather = works  # type: ignore[method-assign]
    assert sender.send([0], last=True, metadata=metadata())
    commit_all(receiver)


def test_rooms_are_limited() -> None:
    with pair(prefill=dataclasses.replace(QUICK, max_rooms=1)) as both:
        sender, receiver = both.ready(1)
        refused = both.prefill.manager.open_sender(1000)
        assert "1 rooms are open, which is the limit" in fails(refused)
        early = both.receiver(1001)
        another = both.receiver(1002)
        reasons = fails(another, 3.0) + fails(early, 3.0)
        assert "too many rooms wait" in reasons
        sender.abort("done")
        fails(receiver)
