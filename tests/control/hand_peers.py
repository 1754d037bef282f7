# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server whose messages are written by hand, for a real one to talk to.

Real sockets, real bytes, a real transfer engine; what is said, and when, is up to the test.
"""

import abc
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from kvferry.control.connection import KVManager, KVReceiver, KVSender
from kvferry.control.engines.base import EngineOptions, TransferEngine
from kvferry.control.engines.canary import canary_specs, make_canary
from kvferry.control.engines.fake_engine import FakeEngine
from kvferry.control.engines.registry import create_engine
from kvferry.control.ids import IdSource, new_generation, new_instance_id
from kvferry.control.messages import (
    CanaryDone,
    Hello,
    Instance,
    KVChunk,
    KVMetadata,
    Leaf,
    Lookup,
    LookupReply,
    Message,
    Ping,
    Pong,
    Welcome,
)
from kvferry.control.security import endpoint
from kvferry.control.wire import decode, encode
from kvferry.tests.control.pairs import QUICK, Pair, Pool

M = TypeVar("M", bound=Message)
_SECONDS = 10.0


def _counterpart(other: Instance, address: str, port: int = 0) -> Instance:
    """Returns an instance of the other role that fits."""
    return msgspec.structs.replace(
        other,
        instance_id=new_instance_id(),
        generation=new_generation(),
        role="decode" if other.role == "prefill" else "prefill",
        side_channel_port=port,
        engine=msgspec.structs.replace(other.engine, address=address),
    )


class _Hand(abc.ABC):
    """What both have in common: a socket, and the messages that came and were not asked for."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.messages: list[Message] = []
        self._unanswered = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, kind: type[M], seconds: float = _SECONDS) -> M:
        """Returns the oldest message of a kind; waits for it for a bounded time."""
        until = time.monotonic() + seconds
        while True:
            for message in self.messages:
                if isinstance(message, kind):
                    self.messages.remove(message)
                    return message
            left = until - time.monotonic()
            assert left > 0, f"no {kind.__name__} came, but {self.messages}"
            self.pump(left)

    def pump(self, seconds: float = 0.0) -> None:
        """Takes what has come; waits for the first of it."""
        if self._socket.poll(int(seconds * 1000)):
            while self._socket.poll(0):
                self._take(self._socket.recv_multipart())

    def send(self, message: Message) -> None:
        self._unanswered += isinstance(message, Ping)
        self.send_frames([encode(message)])

    def heard(self) -> None:
        """Waits until everything sent so far was dealt with: messages are taken in order."""
        self.send(Ping())
        while self._unanswered:
            self.receive(Pong)
            self._unanswered -= 1

    @abc.abstractmethod
    def send_frames(self, frames: Sequence[bytes]) -> None:
        """Sends one message, whatever it is made of."""

    @abc.abstractmethod
    def _take(self, frames: list[bytes]) -> None:
        """Takes one message that has come."""


class HandDecode(_Hand):
    """A decode server on one connection to a prefill server.

    Args:
        prefill: The prefill server.
        instance: Who it says that it is; by default one that fits.
    """

    def __init__(self, prefill: Instance, instance: Instance | None = None) -> None:
        super().__init__(zmq.DEALER)
        self._socket.connect(endpoint(prefill.host, prefill.side_channel_port))
        self.instance = instance or _counterpart(prefill, "nowhere")
        self.canary_key = 0

    def greet(self) -> None:
        self.send(Hello(instance=self.instance))
        self.canary_key = self.receive(Welcome).canary_key
        self.send(CanaryDone(canary_key=self.canary_key))

    def send_frames(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames)

    def _take(self, frames: list[bytes]) -> None:
        self.messages.append(decode(frames[0]))


class HandPrefill(_Hand):
    """A prefill server, and the bootstrap server that knows it, on one port.

    Look-ups and greetings are answered by `pump`.

    Args:
        decode: The decode server that is going to come.
        engine: A transfer engine that is not started.
        pool: Its pages.
    """

    def __init__(self, decode: Instance, engine: TransferEngine, pool: Pool) -> None:
        super().__init__(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.engine, self.pool = engine, pool
        self.instance = _counterpart(decode, engine.start(), self.port)
        self.peer = b""
        self._ids = IdSource()

    def close(self) -> None:
        super().close()
        self.engine.close()

    def send_frames(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart([self.peer, *frames])

    def pump_until(self, condition: Callable[[], object]) -> None:
        """Answers until a condition holds, for a bounded time."""
        until = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < until, f"not true in time: {condition} {self.messages}"
            self.pump(0.01)

    def chunk(
        self,
        transfer_id: int,
        sequence: int,
        first_page: int,
        pages: Sequence[int],
        metadata: KVMetadata | None = None,
    ) -> KVChunk:
        """Publishes pages; returns what is to be said about them, the last ones with metadata."""
        key = self._ids.next_id()
        arrays = self.pool.gather(pages)
        self.engine.publish(key, arrays, 60.0)
        return KVChunk(
            transfer_id=transfer_id,
            sequence=sequence,
            key=key,
            first_page=first_page,
            num_pages=len(pages),
            leaves=[Leaf(array.shape, str(array.dtype)) for array in arrays],
            last=metadata is not None,
            metadata=metadata,
        )

    def welcome(self) -> Welcome:
        """Publishes test arrays; returns the greeting that names them."""
        key = self._ids.next_id()
        arrays = make_canary(self.instance.instance_id, canary_specs())
        self.engine.publish(key, arrays, 60.0)
        return Welcome(instance=self.instance, canary_key=key)

    def _take(self, frames: list[bytes]) -> None:
        peer, message = frames[0], decode(frames[1])
        if isinstance(message, Lookup):
            reply = LookupReply(query=message.query, instance=self.instance)
            self._socket.send_multipart([peer, encode(reply)])
        elif isinstance(message, Ping):
            self._socket.send_multipart([peer, encode(Pong(timeout_seconds=3.0))])
        elif isinstance(message, Hello):
            self.peer = peer
            self.send(self.welcome())
        else:
            self.messages.append(message)


# Peers by hand send no pings, and nothing may end by itself.
PATIENT = dataclasses.replace(
    QUICK,
    peer_timeout_seconds=60.0,
    orphan_timeout_seconds=60.0,
    progress_timeout_seconds=60.0,
    pull_timeout_seconds=60.0,
)


# What counts messages that are ignored.
UNKNOWN = "unknown_transfer"
DUPLICATE = "duplicate"
TOO_EARLY = "early"
UNEXPECTED = "unexpected"
STALE = "stale_generation"


@dataclasses.dataclass(frozen=True)
class Intruder:
    """One message that does not belong where it is sent.

    Attributes:
        name: For people.
        after: The step of a transfer after which it is sent.
        message: Makes it from the transfer.
        counter: What counts it; empty if nothing does.
        by_other: Whether another peer sends it than the one whose transfer it is.
        answer: What its sender is told, if anything.
    """

    name: str
    after: str
    message: Callable[[Any], Message]
    counter: str = ""
    by_other: bool = False
    answer: type[Message] | None = None

    def counted(self) -> dict[str, int]:
        """Returns by how much the counters of ignored messages grow."""
        return {f"ignored_{self.counter}": 1} if self.counter else {}

    def disturb(self, transfer: Any, leg: KVSender | KVReceiver) -> None:
        """Sends it in the middle of a transfer: it is counted, answered if at all, and ignored."""
        by = transfer.other if self.by_other else transfer.owner
        before, state = ignored(transfer.manager), leg.poll()
        by.send(self.message(transfer))
        if self.answer is not None:
            by.receive(self.answer)
        by.heard()
        assert ignored(transfer.manager, before) == self.counted()
        assert leg.poll() is state


def by_name(kinds: Mapping[str, Sequence[Intruder]]) -> dict[str, Intruder]:
    """Returns intruders of several kinds, each by its kind and name."""
    return {f"{kind}: {each.name}": each for kind, several in kinds.items() for each in several}


def engine_like(both: Pair) -> TransferEngine:
    """Makes one more engine that those of a pair can reach; not started."""
    name = both.prefill.engine.engine_name
    if name == "fake":
        return FakeEngine(EngineOptions(), both.network)
    return create_engine(name, EngineOptions(channels=2))


def ignored(manager: KVManager, before: dict[str, int] | None = None) -> dict[str, int]:
    """Returns how many messages a manager has ignored, by kind, and since when if that is given."""
    totals = {k: total for k, total in manager.counters().items() if k.startswith("ignored_")}
    grown = {k: total - (before or {}).get(k, 0) for k, total in totals.items()}
    return {k: total for k, total in grown.items() if total}
