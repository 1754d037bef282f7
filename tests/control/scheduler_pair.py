# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode scheduler in one process: real threads and sockets, a tiny model."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.connection import KVManager
from kvferry.control.decode import DecodeScheduler
from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.kv_layout import KVLayout
from kvferry.control.prefill import PrefillScheduler
from kvferry.control.zmq_connection import ControlOptions, create_manager
from kvferry.engine.request import BootstrapInfo
from kvferry.engine.runner import ModelRunner
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.tests.control.pairs import QUICK, is_baseline, wait_until
from kvferry.tests.engine.driving import (
    Answer,
    make_request,
    shared_sampler,
    shared_tokenizer,
)
from kvferry.tests.engine.tiny import tiny_runner


@functools.cache
def _runner(role: str) -> ModelRunner:
    """Makes a runner for each role, with a pool of its own; nothing compiles under a timeout."""
    runner = tiny_runner()
    runner.warm_up(
        lambda done, total, label: None,
        copies=("gather",) if role == "prefill" else ("scatter",),
        on_logits=shared_sampler().warm_up,
    )
    return runner


def page_bytes() -> int:
    """Returns the size of a page of the tiny model, all layers together."""
    return sum(spec.size * spec.dtype.itemsize for spec in _runner("prefill").pool.specs(1))


def runner_layout(runner: ModelRunner) -> KVLayout:
    """Describes the runner's pages as a server does."""
    pool, config = runner.pool, runner.config
    return KVLayout(
        num_layers=config.num_layers,
        page_size=pool.page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=pool.layout.dtype,
        storage_dtype=str(pool.specs(1)[0].dtype),
        page_shape=pool.specs(1)[0].shape[1:],
        page_buckets=pool.buckets,
        model_fingerprint="tiny",
        max_context=runner.sizes.max_context,
    )


@dataclasses.dataclass
class SchedulerPair:
    """What runs; `network` is where pulls can be held back."""

    prefill: PrefillScheduler
    decode: DecodeScheduler
    managers: tuple[KVManager, KVManager]
    engines: tuple[FakeEngine, FakeEngine]
    network: FakeNetwork
    bootstrap_port: int
    rooms: Iterator[int]

    def bootstrap(self) -> BootstrapInfo:
        """Returns where the two halves of a new request meet."""
        return BootstrapInfo("127.0.0.1", self.bootstrap_port, next(self.rooms))

    def submit(self, prompt: list[int], **fields: Any) -> tuple[Answer, Answer]:
        """Submits both halves of a request; returns the answers of P and of D."""
        fields = {"bootstrap": self.bootstrap(), **fields}
        answers = Answer(), Answer()
        for scheduler, answer in zip((self.prefill, self.decode), answers, strict=True):
            answer.ticket = scheduler.submit(make_request(answer, prompt, **fields))
        return answers

    def wait_at_rest(self) -> None:
        """Waits until neither server holds anything."""
        for scheduler, manager in zip((self.prefill, self.decode), self.managers, strict=True):
            _wait_at_rest(scheduler, manager)


def _wait_at_rest(scheduler: Scheduler, manager: KVManager) -> None:
    wait_until(lambda: is_baseline(manager), what=str(manager.counters()))
    wait_until(lambda: scheduler.stats().live == scheduler.stats().used_pages == 0)
    assert scheduler.failure is None


def finish_of(*answers: Answer, seconds: float = 20.0) -> list[str]:
    """Waits for the ends; returns for each its kind, and what the client of a failure is told."""
    wait_until(lambda: all(answer.finish for answer in answers), seconds)
    ends = [answer.finish for answer in answers]
    return [
        f"{end.status} {end.message}" if end.kind == "abort" else end.kind for end in ends if end
    ]


@contextlib.contextmanager
def scheduler_pair(
    *,
    options: ControlOptions = QUICK,
    prefill_limits: SchedulerLimits | None = None,
    decode_limits: SchedulerLimits | None = None,
    max_chunk_pages: int | None = None,
) -> Iterator[SchedulerPair]:
    """Runs a pair behind a bootstrap server; afterwards everything is stopped."""
    network = FakeNetwork()
    engines = FakeEngine(EngineOptions(), network), FakeEngine(EngineOptions(), network)
    with contextlib.ExitStack() as stack:
        bootstrap = ZmqBootstrapServer("127.0.0.1", 0, options=options.channel_options())
        bootstrap.start()
        stack.callback(bootstrap.stop)
        kinds = (
            ("prefill", PrefillScheduler, prefill_limits),
            ("decode", DecodeScheduler, decode_limits),
        )
        schedulers, managers = [], []
        for (role, kind, limits), engine in zip(kinds, engines, strict=True):
            runner = _runner(role)
            scheduler: Any = kind(runner, shared_tokenizer(), limits, sampler=shared_sampler())
            manager = create_manager(
                "prefill" if role == "prefill" else "decode",
                options=dataclasses.replace(options, bootstrap_port=bootstrap.port),
                layout=runner_layout(runner),
                pages=runner.pool,
                engine=engine,
                on_event=scheduler.wake,
            )
            manager.start()
            stack.callback(manager.stop)
            schedulers.append(scheduler)
            managers.append(manager)
        prefill, decode = schedulers
        prefill.connect(managers[0], max_chunk_pages)
        decode.connect(managers[1], bootstrap.port)
        for scheduler in schedulers:
            scheduler.start()
            stack.callback(scheduler.stop)
        yield SchedulerPair(
            prefill,
            decode,
            (managers[0], managers[1]),
            engines,
            network,
            bootstrap.port,
            itertools.count(1),
        )
