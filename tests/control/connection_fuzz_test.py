# SPDX-License-Identifier: Apache-2.0
"""Peers that say anything in any order, to a real prefill and a real decode server.

Valid messages out of order, replayed, about rooms and transfers of others, of another generation or
in the wrong direction, broken ones, and any frames, between what the server's own schedulers do.
Whatever it was: the process lives, nothing is left over, and a good transfer works afterwards.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import hypothesis
import msgspec
import pytest

from kvferry.control.connection import KVReceiver, KVSender
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
    Leaf,
    Message,
    Ping,
    Pong,
    Refused,
    Touched,
    Welcome,
)
from kvferry.control.wire import encode
from kvferry.control.zmq_decode import DecodeManager
from kvferry.control.zmq_prefill import PrefillManager
from kvferry.tests.control.fuzz_steps import Step, broken, steps_of
from kvferry.tests.control.hand_peers import PATIENT, HandDecode, HandPrefill, engine_like
from kvferry.tests.control.pairs import (
    Pair,
    is_baseline,
    metadata,
    pair,
    wait_until,
)


class Prefill:
    """A real prefill server with its scheduler, and three decode servers by hand."""

    _rooms = itertools.count(1_000_000, 3)

    def __init__(self, both: Pair, instances: Sequence[Instance]) -> None:
        manager = both.prefill.manager
        assert isinstance(manager, PrefillManager)
        self._manager, self._both, self._instances = manager, both, instances
        self._first_room = next(self._rooms)
        self._senders: dict[int, KVSender] = {}
        self._sent: collections.Counter[int] = collections.Counter()
        self._last_sent: set[int] = set()
        self._gone: collections.Counter[int] = collections.Counter()
        self._peers = [HandDecode(manager.instance, each) for each in instances]
        for peer in self._peers[:2]:
            peer.greet()

    def message(self, step: Step) -> Message | None:
        """Returns what a step says, or None if it says nothing."""
        room, number = self._first_room + step.room, step.number
        transfer_id = room if number % 2 else room + 1
        right = self._manager.instance.generation
        told: dict[str, Callable[[], Message]] = {
            "open": lambda: KVOpen(
                room=room, transfer_id=transfer_id, generation=right if number else 1
            ),
            "request": lambda: KVRequest(
                room=room,
                transfer_id=transfer_id,
                first_page=number,
                num_pages=(0, 1, 3, 5, 9, (1 << 31) - 1)[number],
                prompt_tokens=number,
            ),
            "done": lambda: KVChunkDone(room=room, transfer_id=transfer_id, sequence=number // 2),
            "abort": lambda: KVAbort(room=room, transfer_id=transfer_id, reason="x", status=400),
            "touched": lambda: Touched(transfer_ids=[transfer_id] * number),
            "canary": lambda: CanaryDone(canary_key=self._peers[number % 3].canary_key),
            "hello": lambda: Hello(instance=self._instances[number % 3]),
            "hello of another": lambda: Hello(
                instance=msgspec.structs.replace(self._instances[0], role="prefill")
            ),
            "chunk": lambda: KVChunk(
                transfer_id=transfer_id, sequence=0, key=1, first_page=0, num_pages=1
            ),
            "announce": lambda: Announce(instance_id="i", rooms=[room]),
            "welcome": lambda: Welcome(instance=self._manager.instance, canary_key=number),
            "ping": Ping,
            "pong": lambda: Pong(timeout_seconds=1.0 + number),
        }
        return told[step.name]() if step.name in told else None

    MESSAGES = (
        *("open", "request", "done") * 3,
        *("abort", "touched", "canary", "hello", "hello of another", "chunk", "announce"),
        *("welcome", "ping", "pong"),
    )
    OWN = ("sender", "send", "give up")
    # What a good transfer would do next, told by the peer whose it is.
    GOOD = ("sender", "open", "request", "send", "done", "send", "done", "send", "done")

    def _go_on(self, step: Step) -> None:
        place = self._gone[step.room]
        self._gone[step.room] += 1
        if place < len(self.GOOD):
            number = (1, 3, 3, 1, 1, 1, 3, 1, 5)[place]
            self.play(Step(self.GOOD[place], step.room % 2, step.room, number))

    def play(self, step: Step) -> None:
        """Does one step."""
        peer, message = self._peers[step.who], self.message(step)
        if step.name == "go on":
            self._go_on(step)
        elif step.frames:
            peer.send_frames(step.frames)
        elif step.name == "broken":
            other = dataclasses.replace(step, name=self.MESSAGES[step.number])
            good = self.message(other)
            assert good is not None
            peer.send_frames([broken(good, step.number)])
        elif message is not None:
            peer.send(message)
        else:
            for each in self._peers:
                each.heard()
            self._own(step)

    def _own(self, step: Step) -> None:
        room = self._first_room + step.room
        sender = self._senders.get(room)
        if step.name == "sender" and sender is None:
            self._senders[room] = self._manager.open_sender(room)
        elif step.name == "give up" and sender is not None:
            sender.abort("given up")
        elif step.name == "send" and sender is not None and room not in self._last_sent:
            self._send(room, sender)

    def _send(self, room: int, sender: KVSender) -> None:
        if sender.request is None or sender.poll().terminal:
            return
        left = sender.request.num_pages - self._sent[room]
        pages, last = [0, 1][:left], left <= 2
        if sender.send(pages, last=last, metadata=metadata() if last else None):
            self._sent[room] += len(pages)
            if last:
                self._last_sent.add(room)

    def end(self) -> None:
        """Ends everything, as a scheduler would and as decode servers that connect anew."""
        for each in self._peers:
            each.heard()
        for sender in self._senders.values():
            sender.abort("the end")
        anew = [HandDecode(self._manager.instance, each) for each in self._instances]
        for peer in anew:
            peer.greet()
            peer.heard()
        wait_until(lambda: is_baseline(self._manager), what=str(self._manager.counters()))
        assert self._manager.failure is None and self._manager.counters()["peers"] <= 4
        for each in (*self._peers, *anew):
            each.close()
        self._both.transfer(2)


class Decode:
    """A real decode server with its scheduler, and a prefill server by hand."""

    def __init__(self, both: Pair) -> None:
        manager = both.decode.manager
        assert isinstance(manager, DecodeManager)
        self._manager, self._both = manager, both
        self._engine = engine_like(both)
        self._hand = HandPrefill(manager.instance, self._engine, both.prefill.pool)
        self._receivers: dict[int, KVReceiver] = {}
        self._transfers: dict[int, int] = {}
        self._gone: collections.Counter[int] = collections.Counter()

    def message(self, step: Step) -> Message | None:
        """Returns what a step says, or None if it says nothing."""
        room, number = step.room, step.number
        transfer_id = self._transfers.get(room, 1 << 40 | room)
        told: dict[str, Callable[[], Message]] = {
            "accept": lambda: KVAccept(transfer_id=transfer_id),
            "accept of another": lambda: KVAccept(transfer_id=transfer_id ^ (1 << 10 * number)),
            "chunk": lambda: self._hand.chunk(
                transfer_id,
                number // 2,
                2 * (number // 2),
                [0, 1, 2][: 2 + number // 2],
                metadata() if number // 2 else None,
            ),
            "chunk of nothing": lambda: KVChunk(
                transfer_id=transfer_id, sequence=number % 2, key=number, first_page=0, num_pages=0
            ),
            "chunk of strange arrays": lambda: KVChunk(
                transfer_id=transfer_id,
                sequence=number % 2,
                key=number,
                first_page=number % 2 * 2,
                num_pages=(1, 2, 3, 4, 5, (1 << 31) - 1)[number],
                leaves=[Leaf((1 << 30,) * number, "float32")] * number,
                last=number > 3,
                metadata=metadata() if number > 2 else None,
            ),
            "failed": lambda: KVFailed(transfer_id=transfer_id, reason="x", status=400),
            "touched": lambda: Touched(transfer_ids=[transfer_id, number]),
            "welcome": self._hand.welcome,
            "hello wanted": HelloWanted,
            "refused": lambda: Refused(reason="x", status=500),
            "open": lambda: KVOpen(room=room, transfer_id=transfer_id, generation=number),
            "done": lambda: KVChunkDone(room=room, transfer_id=transfer_id, sequence=number),
            "ping": Ping,
            "pong": lambda: Pong(timeout_seconds=1.0 + number),
        }
        return told[step.name]() if step.name in told else None

    MESSAGES = (
        *("accept", "chunk", "chunk") * 4,
        *("accept of another", "chunk of nothing", "chunk of strange arrays", "failed", "touched"),
        *("welcome", "hello wanted", "refused", "open", "done", "ping", "pong"),
    )
    OWN = ("receiver", "request", "commit", "give up")
    GOOD = ("receiver", "request", "accept", "chunk", "commit", "chunk", "commit")

    def _go_on(self, step: Step) -> None:
        place = self._gone[step.room]
        self._gone[step.room] += 1
        if place < len(self.GOOD):
            self.play(Step(self.GOOD[place], step.who, step.room, place // 5 * 2))

    def play(self, step: Step) -> None:
        """Does one step."""
        message = self.message(step)
        self._hand.pump()
        if step.name == "go on":
            self._go_on(step)
        elif step.frames:
            self._say(step.frames)
        elif step.name == "broken":
            good = self.message(dataclasses.replace(step, name=self.MESSAGES[step.number * 2]))
            assert good is not None
            self._say([broken(good, step.number)])
        elif message is not None:
            self._say([encode(message)])
        else:
            self._own(step)

    def _say(self, frames: Sequence[bytes]) -> None:
        if self._hand.peer:
            self._hand.send_frames(frames)

    def _own(self, step: Step) -> None:
        receiver = self._receivers.get(step.room)
        if step.name == "receiver" and receiver is None:
            receiver = self._open()
            self._receivers[step.room] = receiver
            if not receiver.poll().terminal:
                self._transfers[step.room] = self._hand.receive(KVOpen).transfer_id
        elif step.name == "request" and receiver is not None:
            with contextlib.suppress(RuntimeError):  # Asked for before.
                receiver.request(self._both.reserved(5), prompt_tokens=20)
        elif step.name == "commit" and receiver is not None:
            receiver.commit()
        elif step.name == "give up" and receiver is not None:
            receiver.abort("given up")

    def _open(self) -> KVReceiver:
        """Opens a receiver, and waits until the server by hand has heard of it, or it is over."""
        receiver = self._manager.open_receiver("127.0.0.1", self._hand.port, next(self._both.rooms))
        self._hand.messages.clear()
        self._hand.pump_until(
            lambda: (
                receiver.poll().terminal
                or any(isinstance(each, KVOpen) for each in self._hand.messages)
            )
        )
        return receiver

    def _move_one(self) -> bool:
        """Moves one prompt; returns whether it arrived."""
        receiver = self._open()
        receiver.request(self._both.reserved(2), prompt_tokens=8)
        if not receiver.poll().terminal:
            transfer_id = self._hand.receive(KVOpen).transfer_id
            self._hand.send(KVAccept(transfer_id=transfer_id))
            self._hand.pump_until(lambda: receiver.poll() is not KVPoll.Bootstrapping)
            self._hand.send(self._hand.chunk(transfer_id, 0, 0, [0, 1], metadata()))
        self._hand.pump_until(lambda: receiver.commit() or receiver.poll().terminal)
        if receiver.poll() is not KVPoll.Success:
            return False
        self._both.check([0, 1], self._both.reserved(2))
        return True

    def end(self) -> None:
        """Ends everything as a scheduler would, and moves one prompt as a good server would."""
        for receiver in self._receivers.values():
            receiver.abort("the end")
        wait_until(lambda: is_baseline(self._manager), what=str(self._manager.counters()))
        # A message before may have cost the connection, which then ends under the next room.
        assert any(self._move_one() for _ in range(5))
        self._hand.close()
        wait_until(lambda: is_baseline(self._manager) and self._manager.counters()["peers"] <= 1)
        assert self._manager.failure is None


@pytest.fixture(name="both", scope="module")
def _both() -> Iterator[Pair]:
    with pair(prefill=PATIENT, decode=PATIENT) as made:
        made.transfer()
        yield made
        wait_until(made.at_baseline)
        made.transfer()


@pytest.fixture(name="instances", scope="module")
def _instances(both: Pair) -> list[Instance]:
    assert isinstance(both.prefill.manager, PrefillManager)
    made = [HandDecode(both.prefill.manager.instance) for _ in range(3)]
    for each in made:
        each.close()
    return [each.instance for each in made]


def _play_prefill(both: Pair, instances: Sequence[Instance], steps: Sequence[Step]) -> None:
    server = Prefill(both, instances)
    for step in steps:
        server.play(step)
    server.end()


_PREFILL_STEPS = (*Prefill.MESSAGES, *Prefill.OWN, "broken")


@hypothesis.settings(max_examples=100)
@hypothesis.given(steps_of(_PREFILL_STEPS, 60))
def test_decode_servers_say_anything(
    both: Pair, instances: list[Instance], steps: list[Step]
) -> None:
    _play_prefill(both, instances, steps)


@pytest.mark.slow
@hypothesis.settings(max_examples=1000)
@hypothesis.given(steps_of(_PREFILL_STEPS, 120))
def test_decode_servers_say_more(both: Pair, instances: list[Instance], steps: list[Step]) -> None:
    _play_prefill(both, instances, steps)


_DECODE_STEPS = (*Decode.MESSAGES, *Decode.OWN, "broken")


def _play_decode(both: Pair, steps: Sequence[Step]) -> None:
    server = Decode(both)
    for step in steps:
        server.play(step)
    server.end()


@hypothesis.settings(max_examples=100)
@hypothesis.given(steps_of(_DECODE_STEPS, 60))
def test_a_prefill_server_says_anything(both: Pair, steps: list[Step]) -> None:
    _play_decode(both, steps)


@pytest.mark.slow
@hypothesis.settings(max_examples=400)
@hypothesis.given(steps_of(_DECODE_STEPS, 120))
def test_a_prefill_server_says_more(both: Pair, steps: list[Step]) -> None:
    _play_decode(both, steps)
