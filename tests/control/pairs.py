# SPDX-License-Identifier: Apache-2.0
"""Parts that several tests of the control layer share: a pool, a layout, a pair of managers."""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.connection import KVManager, KVPages, KVReceiver, KVSender
from kvferry.control.engines.base import EngineOptions, TransferEngine
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.engines.registry import create_engine
from kvferry.control.kv_layout import KVLayout
from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import KVMetadata
from kvferry.control.zmq_connection import ControlOptions, create_manager

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
PAGE_SHAPE = (4, 6, 8)
LAYERS = 3
LAYOUT = KVLayout(
    num_layers=LAYERS,
    page_size=4,
    num_kv_heads=3,
    head_dim=8,
    dtype="bfloat16",
    storage_dtype="uint16",
    page_shape=PAGE_SHAPE,
    page_buckets=BUCKETS,
    model_fingerprint="test",
    max_context=256,
)
QUICK = ControlOptions(
    peer_timeout_seconds=1.0,
    orphan_timeout_seconds=1.0,
    progress_timeout_seconds=1.5,
    pull_timeout_seconds=5.0,
)


def wait_until(condition: Callable[[], Any], seconds: float = 10.0, what: str = "") -> float:
    """Waits for a condition, for a bounded time; returns how long that took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"not true within {seconds} s: {what or condition}")
        time.sleep(0.001)
    return time.monotonic() - start


class Pool:
    """A pool of pages held by numpy; every page of every layer has its own content."""

    def __init__(
        self,
        num_pages: int = 64,
        *,
        seed: int | None = None,
        page_shape: tuple[int, ...] = PAGE_SHAPE,
    ) -> None:
        rng = np.random.default_rng(seed)
        shape = (num_pages, *page_shape)
        self.layers = [
            np.zeros(shape, np.uint16)
            if seed is None
            else rng.integers(0, 1 << 16, shape, dtype=np.uint16)
            for _ in range(LAYERS)
        ]

    def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
        padded = [*page_ids, *[0] * (bucket(len(page_ids)) - len(page_ids))]
        return [jnp.asarray(layer[padded]) for layer in self.layers]

    def scatter(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        for layer, array in zip(self.layers, arrays, strict=True):
            layer[list(page_ids)] = np.asarray(array)[: len(page_ids)]

    def specs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        shape = (bucket(num_pages), *self.layers[0].shape[1:])
        return [jax.ShapeDtypeStruct(shape, np.uint16) for _ in self.layers]

    def pages(self, page_ids: Sequence[int]) -> list[np.ndarray]:
        return [layer[list(page_ids)] for layer in self.layers]


def bucket(count: int) -> int:
    return next(size for size in BUCKETS if size >= count)


def metadata(first_token: int = 7, prompt_tokens: int = 20, **more: Any) -> KVMetadata:
    return KVMetadata(first_token=first_token, prompt_tokens=prompt_tokens, **more)


class Events:
    """Counts calls of `on_event`."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.count += 1


@dataclasses.dataclass
class Side:
    """One manager with its pool."""

    manager: KVManager
    pool: Pool
    events: Events
    engine: TransferEngine


@dataclasses.dataclass
class Pair:
    """A prefill and a decode manager in one process, each with its own control thread."""

    bootstrap: ZmqBootstrapServer
    prefill: Side
    decode: Side
    network: FakeNetwork
    rooms: Iterator[int]
    host: str

    def open(self, num_pages: int = 5, *, request: bool = True) -> tuple[KVSender, KVReceiver]:
        """Opens both legs of a new room; D's pages are the last ones of its pool."""
        room = next(self.rooms)
        receiver = self.receiver(room)
        sender = self.prefill.manager.open_sender(room)
        if request:
            receiver.request(self.reserved(num_pages), prompt_tokens=num_pages * 4)
        return sender, receiver

    def receiver(self, room: int) -> KVReceiver:
        return self.decode.manager.open_receiver(self.host, self.bootstrap.port, room)

    def reserved(self, num_pages: int) -> list[int]:
        return list(range(63, 63 - num_pages, -1))

    def ready(self, num_pages: int = 5) -> tuple[KVSender, KVReceiver]:
        """As `open`, and waits until both are `WaitingForInput`."""
        sender, receiver = self.open(num_pages)
        wait_until(lambda: sender.poll() is KVPoll.WaitingForInput, what=str(receiver.failure))
        wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput)
        return sender, receiver

    def transfer(self, num_pages: int = 5) -> None:
        """Moves one prompt and checks that it arrived."""
        sender, receiver = self.ready(num_pages)
        source = list(range(num_pages))
        assert sender.send(source, last=True, metadata=metadata())
        commit_all(receiver)
        wait_until(lambda: sender.poll() is KVPoll.Success)
        self.check(source, self.reserved(num_pages))

    def carry_rooms(self) -> None:
        """Moves rooms of several sizes, and gives one up in the middle."""
        for num_pages in (1, 5, 40):
            self.transfer(num_pages)
        sender, receiver = self.ready(2)
        assert sender.send([0], last=False)
        sender.abort("the client has left")
        assert "the client has left" in fails(receiver)
        wait_until(self.at_baseline)

    def check(self, source: Sequence[int], target: Sequence[int]) -> None:
        ours, theirs = self.prefill.pool.pages(source), self.decode.pool.pages(target)
        for layer, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            np.testing.assert_array_equal(left, right, err_msg=f"layer {layer}")

    def at_baseline(self) -> bool:
        return all(is_baseline(side.manager) for side in (self.prefill, self.decode))


def is_baseline(manager: KVManager) -> bool:
    """Whether nothing is held: no rooms, no publications, no pulls."""
    counters = manager.counters()
    held = ("open_rooms", "early_rooms", "published_bytes", "published_chunks", "published_keys")
    return not any(counters.get(name, 0) for name in (*held, "pending_pulls", "draining_pulls"))


def commit_all(receiver: KVReceiver) -> None:
    """Plays D's step thread until the receiver ends; fails the test if it fails."""

    def step() -> bool:
        receiver.commit()
        return receiver.poll().terminal

    wait_until(step)
    assert receiver.poll() is KVPoll.Success, receiver.failure


def reaches(leg: KVSender | KVReceiver, state: KVPoll, seconds: float = 10.0) -> None:
    """Waits until a leg is in a state."""
    wait_until(lambda: leg.poll() is state, seconds, f"{state.name}: {leg.failure}")


def fails(leg: KVSender | KVReceiver, seconds: float = 10.0) -> str:
    """Waits until a leg has failed; returns the reason."""
    wait_until(lambda: leg.poll() is KVPoll.Failed, seconds)
    assert leg.failure is not None
    return leg.failure.reason


@contextlib.contextmanager
def pair(
    engine: str = "fake",
    *,
    prefill: ControlOptions = QUICK,
    decode: ControlOptions = QUICK,
    layouts: tuple[KVLayout, KVLayout] = (LAYOUT, LAYOUT),
    engines: tuple[TransferEngine, TransferEngine] | None = None,
    wrap: Callable[[KVPages], KVPages] = lambda pages: pages,
    host: str = "127.0.0.1",
) -> Iterator[Pair]:
    """Runs a pair; afterwards everything is stopped."""
    network = FakeNetwork()
    bootstrap = ZmqBootstrapServer(host, 0, options=prefill.channel_options())
    with contextlib.ExitStack() as stack:
        bootstrap.start()
        stack.callback(bootstrap.stop)
        prefill = dataclasses.replace(
            prefill, host=host, bootstrap_host=host, bootstrap_port=bootstrap.port
        )
        decode = dataclasses.replace(decode, host=host)
        sides: list[Side] = []
        for index, (role, options) in enumerate((("prefill", prefill), ("decode", decode))):
            if engines is not None:
                made = engines[index]
            elif engine == "fake":
                made = FakeEngine(EngineOptions(), network)
            else:
                made = create_engine(engine, EngineOptions(channels=2, host=host))
            pool, events = Pool(seed=1 if role == "prefill" else None), Events()
            manager = create_manager(
                "prefill" if role == "prefill" else "decode",
                options=options,
                layout=layouts[index],
                pages=wrap(pool),
                engine=made,
                on_event=events,
            )
            manager.start()
            stack.callback(manager.stop)
            sides.append(Side(manager, pool, events, made))
        yield Pair(bootstrap, sides[0], sides[1], network, itertools.count(1), host)
