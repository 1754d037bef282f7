# SPDX-License-Identifier: Apache-2.0
"""The life of rooms: two managers, real sockets, the in-process engine; failures are elsewhere."""

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.control.engines.base import EngineOptions, EngineStartError
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.kv_poll import KVPoll
from kvferry.control.security import InsecureBindError, PortInUseError
from kvferry.control.zmq_connection import ControlOptions, create_manager
from kvferry.tests.control.pairs import (
    LAYOUT,
    QUICK,
    Pair,
    Pool,
    commit_all,
    fails,
    is_baseline,
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


def test_one_room_from_start_to_end(both: Pair) -> None:
    sender, receiver = both.open()
    reaches(sender, KVPoll.WaitingForInput)
    reaches(receiver, KVPoll.WaitingForInput)
    wanted = sender.request
    assert wanted is not None
    assert (wanted.first_page, wanted.num_pages, wanted.prompt_tokens) == (0, 5, 20)
    sent = metadata(
        first_token=3,
        cached_tokens=4,
        first_token_logprob=-0.5,
        top_logprobs=[(-0.5, 3), (-2.0, 9)],
        extra={"draft": b"state"},
    )
    assert sender.send([0, 1, 2], last=False)
    assert sender.send([3, 4], last=True, metadata=sent)
    assert sender.poll() is KVPoll.Transferring
    assert receiver.metadata is None
    commit_all(receiver)
    assert receiver.metadata == sent
    reaches(sender, KVPoll.Success)
    both.check([0, 1, 2, 3, 4], both.reserved(5))
    assert receiver.failure is None and sender.failure is None
    timing = receiver.timing
    assert None not in (timing.ready, timing.first_chunk, timing.finished)
    assert timing.num_bytes == sender.timing.num_bytes > 0
    p, d = both.prefill.manager.counters(), both.decode.manager.counters()
    assert p["transfers_ok"] == d["transfers_ok"] == 1
    assert p["bytes_sent"] == d["bytes_received"] == timing.num_bytes
    assert not any(name.startswith("ignored") for name in (*p, *d)), (p, d)
    assert both.prefill.events.count and both.decode.events.count


def test_prefill_may_come_long_before_decode(both: Pair) -> None:
    sender = both.prefill.manager.open_sender(50)
    time.sleep(0.3)
    receiver = both.receiver(50)
    receiver.request([1], prompt_tokens=4)
    reaches(sender, KVPoll.WaitingForInput)
    assert sender.send([2], last=True, metadata=metadata())
    commit_all(receiver)


def test_decode_may_come_long_before_prefill(both: Pair) -> None:
    receiver = both.receiver(51)
    receiver.request([1], prompt_tokens=4)
    wait_until(lambda: both.prefill.manager.counters()["early_rooms"] == 1)
    assert receiver.poll() is KVPoll.Bootstrapping
    sender = both.prefill.manager.open_sender(51)
    reaches(sender, KVPoll.WaitingForInput)  # The request may come a moment after its room.
    assert sender.send([2], last=True, metadata=metadata())
    commit_all(receiver)


def test_decode_may_reserve_late_while_its_queue_moves(both: Pair) -> None:
    sender, receiver = both.open(request=False)
    end = time.monotonic() + 1.5 * QUICK.progress_timeout_seconds
    while time.monotonic() < end:  # Longer than any timeout: it is only queued.
        receiver.mark_progress()
        time.sleep(0.1)
    assert sender.poll() is KVPoll.Bootstrapping and sender.failure is None
    receiver.request(both.reserved(2), prompt_tokens=8)
    reaches(sender, KVPoll.WaitingForInput)
    assert sender.send([0, 1], last=True, metadata=metadata())
    commit_all(receiver)


def test_prefill_may_queue_while_its_queue_moves(both: Pair) -> None:
    sender, receiver = both.ready(1)
    end = time.monotonic() + 1.5 * QUICK.progress_timeout_seconds
    while time.monotonic() < end:
        sender.mark_progress()
        time.sleep(0.1)
    assert receiver.poll() is KVPoll.WaitingForInput
    assert sender.send([0], last=True, metadata=metadata())
    commit_all(receiver)


def test_a_prefix_in_decodes_cache_does_not_travel(both: Pair) -> None:
    room = next(both.rooms)
    receiver, sender = both.receiver(room), both.prefill.manager.open_sender(room)
    receiver.request([40, 41], prompt_tokens=20, first_page=3, extra={"limit": 9})
    reaches(sender, KVPoll.WaitingForInput)
    assert sender.request is not None
    assert (sender.request.first_page, sender.request.extra) == (3, {"limit": 9})
    assert sender.send([8], last=False)
    assert sender.send([9], last=True, metadata=metadata())
    commit_all(receiver)
    both.check([8, 9], [40, 41])


def test_only_metadata_travels_when_decode_has_every_page(both: Pair) -> None:
    room = next(both.rooms)
    receiver, sender = both.receiver(room), both.prefill.manager.open_sender(room)
    receiver.request([], prompt_tokens=20, first_page=5)
    reaches(sender, KVPoll.WaitingForInput)
    assert sender.send([], last=True, metadata=metadata(first_token=11))
    commit_all(receiver)
    assert receiver.metadata is not None and receiver.metadata.first_token == 11


def test_many_rooms_at_once(both: Pair) -> None:
    legs = [both.open(1 + index % 5) for index in range(40)]
    for index, (sender, _) in enumerate(legs):
        reaches(sender, KVPoll.WaitingForInput)
        pages = list(range(1 + index % 5))
        assert sender.send(pages, last=True, metadata=metadata(first_token=index))
    for index, (sender, receiver) in enumerate(legs):
        commit_all(receiver)
        assert receiver.metadata is not None and receiver.metadata.first_token == index
        reaches(sender, KVPoll.Success)


def test_publications_are_bounded() -> None:
    page_bytes = sum(spec.size * 2 for spec in Pool().specs(1))
    prefill = dataclasses.replace(QUICK, max_published_bytes=4 * page_bytes)
    with pair(prefill=prefill) as both:
        legs = [both.ready(4), both.ready(2), both.ready(1)]
        senders = [sender for sender, _ in legs]
        both.network.set(held=True)
        assert senders[0].send([0, 1, 2, 3], last=True, metadata=metadata())
        assert not senders[1].send([4, 5], last=True, metadata=metadata())
        assert not senders[2].send([6], last=True, metadata=metadata())
        assert both.prefill.manager.counters()["published_bytes"] == 4 * page_bytes
        both.network.set(held=False)
        before = both.prefill.events.count
        commit_all(legs[0][1])
        wait_until(lambda: senders[0].poll() is KVPoll.Success)
        assert both.prefill.events.count > before  # The scheduler is told to try again.
        # A peer that is alone leaves half of it to others.
        assert senders[1].send([4, 5], last=True, metadata=metadata())
        assert not senders[2].send([6], last=True, metadata=metadata())
        commit_all(legs[1][1])
        wait_until(lambda: senders[1].poll() is KVPoll.Success)
        assert senders[2].send([6], last=True, metadata=metadata())
        commit_all(legs[2][1])
        wait_until(both.at_baseline)


def test_a_chunk_over_the_limit_passes_alone() -> None:
    with pair(prefill=dataclasses.replace(QUICK, max_published_bytes=1)) as both:
        both.transfer(5)


def test_misuse_of_a_sender(both: Pair) -> None:
    room = next(both.rooms)
    sender = both.prefill.manager.open_sender(room)
    with pytest.raises(RuntimeError, match=r"send\(\) in state Bootstrapping"):
        sender.send([0], last=False)
    with pytest.raises(ValueError, match=f"room {room} is in use"):
        both.prefill.manager.open_sender(room)
    receiver = both.receiver(room)
    receiver.request([1, 2], prompt_tokens=8)
    reaches(sender, KVPoll.WaitingForInput)
    with pytest.raises(ValueError, match="3 pages given, 2 of 2 are still wanted"):
        sender.send([0, 1, 2], last=False)
    with pytest.raises(ValueError, match="1 pages given, 2 of 2 .* last chunk"):
        sender.send([0], last=True, metadata=metadata())
    with pytest.raises(ValueError, match="without pages"):
        sender.send([], last=False)
    with pytest.raises(ValueError, match="metadata travels with the last chunk"):
        sender.send([0, 1], last=True)
    with pytest.raises(ValueError, match="metadata travels with the last chunk"):
        sender.send([0], last=False, metadata=metadata())
    with pytest.raises(ValueError, match="cannot be sent to the peer"):
        sender.send([0, 1], last=True, metadata=metadata(extra={"x": object()}))
    with pytest.raises(ValueError, match="takes .* bytes in a message"):
        sender.send([0, 1], last=True, metadata=metadata(extra={"x": b"x" * (5 << 20)}))
    assert sender.send([0, 1], last=True, metadata=metadata())
    with pytest.raises(RuntimeError, match="after the last chunk"):
        sender.send([0], last=False)
    commit_all(receiver)
    sender.abort("")


def test_misuse_of_a_receiver(both: Pair) -> None:
    sender, receiver = both.ready(1)
    with pytest.raises(RuntimeError, match="pages were requested before"):
        receiver.request([1], prompt_tokens=4)
    with pytest.raises(ValueError, match="is in use"):
        both.receiver(receiver.room)
    with pytest.raises(ValueError, match="room must be between"):
        both.receiver(1 << 63)
    with pytest.raises(ValueError, match="room must be between"):
        both.prefill.manager.open_sender(-1)
    with pytest.raises(ValueError, match="bootstrap port must be between 1 and 65535, got 0"):
        both.decode.manager.open_receiver("127.0.0.1", 0, 5)
    with pytest.raises(RuntimeError, match="cannot receive"):
        both.prefill.manager.open_receiver("127.0.0.1", 1, 5)
    with pytest.raises(RuntimeError, match="cannot send"):
        both.decode.manager.open_sender(5)
    sender.abort("done")
    fails(receiver)
    assert not sender.send([0], last=True, metadata=metadata())  # Failed: said by poll().


@pytest.mark.parametrize(("prefill", "decode"), [(0.4, 10.0), (10.0, 0.4)])
def test_managers_may_differ_in_patience(prefill: float, decode: float) -> None:
    """With nothing to say for several of the shorter timeouts."""
    patient = dataclasses.replace(QUICK, progress_timeout_seconds=30.0)
    options = [
        dataclasses.replace(patient, peer_timeout_seconds=each) for each in (prefill, decode)
    ]
    with pair(prefill=options[0], decode=options[1]) as both:
        both.transfer()
        sender, receiver = both.ready(2)
        time.sleep(5 * min(prefill, decode))
        assert sender.send([0, 1], last=True, metadata=metadata())
        commit_all(receiver)
        reaches(sender, KVPoll.Success)
        assert both.prefill.manager.counters()["peers"] == 1


def test_idle_managers_sleep() -> None:
    with pair(prefill=ControlOptions(), decode=ControlOptions()) as both:
        both.transfer()
        start, cpu = time.monotonic(), time.process_time()
        time.sleep(2.0)
        share = (time.process_time() - cpu) / (time.monotonic() - start)
        assert share < 0.04, f"two idle managers use {share:.1%} of a core"


def test_threads_end_with_the_managers() -> None:
    before = set(threading.enumerate())
    with pair() as both:
        both.transfer()
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_a_taken_port_and_an_open_address_are_refused() -> None:
    def manager(**options: object) -> object:
        return create_manager(
            "prefill",
            options=dataclasses.replace(QUICK, **options),  # type: ignore[arg-type]
            layout=LAYOUT,
            pages=Pool(),
            engine=FakeEngine(EngineOptions()),
            on_event=lambda: None,
        )

    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is taken"):
            manager(side_channel_port=port).start()  # type: ignore[attr-defined]
    with pytest.raises(InsecureBindError, match=r"refusing to listen on 10\.0\.0\.1"):
        manager(host="10.0.0.1").start()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="wildcard"):
        manager(host="0.0.0.0")
    with pytest.raises(ValueError, match="peer_timeout_seconds must be positive, got 0"):
        manager(peer_timeout_seconds=0)
    with pytest.raises(ValueError, match="role must be"):
        create_manager(
            "both",  # type: ignore[arg-type]
            options=QUICK,
            layout=LAYOUT,
            pages=Pool(),
            engine=FakeEngine(EngineOptions()),
            on_event=lambda: None,
        )
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_an_engine_that_fails_its_self_test_does_not_start() -> None:
    network = FakeNetwork()
    network.set(error="no such device")
    manager = create_manager(
        "decode",
        options=QUICK,
        layout=LAYOUT,
        pages=Pool(),
        engine=FakeEngine(EngineOptions(), network),
        on_event=lambda: None,
    )
    with pytest.raises(EngineStartError, match="self-test .* failed: no such device"):
        manager.start()
    with pytest.raises(RuntimeError, match="not started"):
        manager.open_receiver("127.0.0.1", 1, 1)
    assert is_baseline(manager)


@pytest.mark.parametrize("engine", ["jax", "tcp"])
def test_each_engine_carries_rooms(engine: str) -> None:
    with pair(engine) as both:
        both.carry_rooms()
