# SPDX-License-Identifier: Apache-2.0
"""Measures how fast each transfer engine moves arrays between two processes of this machine.

What counts is the time from arrays in one process to arrays, ready for use, in the other. Beside
the engines: one thread's memcpy, a plain TCP copy into memory that exists already, and
`jax.experimental.transfer` itself, with the settings of two other projects and with those of the
jax engine. All methods take turns, repeat by repeat and in random order, so that a noisy moment
hits all alike; compare within a run. Then the latency of a hand-over of one page through the whole
control layer.

    python -m kvferry.bench.transfer_bench --engines=jax,tcp --sizes_mib=64 --repeats=9
"""

import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import app, flags

from kvferry.bench.child import Child, ChildError
from kvferry.bench.handover import DecodeSide
from kvferry.bench.transfer_methods import (
    MEMCPY,
    PEERS,
    PLAIN,
    RAW,
    Payload,
    Target,
    make_target,
    method_names,
    unknown_engine,
)
from kvferry.control.engines.jax_watch import is_ready

_ENGINES = flags.DEFINE_list(
    "engines",
    ["jax", "tcp", "zmq", "shm"],
    "Engines to measure; jax:8:1048576:4 is one with 8 channels, chunks of 1 MiB, 4 copies.",
)
_SIZES_MIB = flags.DEFINE_list("sizes_mib", ["1", "8", "64", "512"], "Payloads, in MiB.")
_COUNTS = flags.DEFINE_list("counts", ["30", "1"], "Arrays per payload.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Repetitions; medians count.", lower_bound=3)
_HANDOVERS = flags.DEFINE_integer(
    "handovers", 60, "Hand-overs of one page per engine; 0: none.", lower_bound=0
)
_RAW = flags.DEFINE_bool(
    "raw",
    True,
    "Measure jax.experimental.transfer itself, too: with the settings of two other projects, and"
    " with those of the jax engine.",
)
_JSON = flags.DEFINE_string("json", None, "Where to write the medians.")

_WARM_UPS = 1
_HANDOVER_WARM_UPS = 5
_LARGE_BYTES = 64 << 20
# What takes a millisecond is noisier, and cheap to repeat.
_SMALL_BYTES = 8 << 20
_SMALL_FACTOR = 5
_JAX = "jax"
_MAX_LATENCY_SECONDS = 0.010

Medians = dict[str, float]  # Seconds by method.


@dataclasses.dataclass(frozen=True)
class Bar:
    """A claim about two methods.

    Attributes:
        method: The one that must be fast.
        factor: How much faster than `other`.
        other: What it is compared with; of several the fastest.
        at_least_bytes: Smallest payload for which it must hold.
    """

    method: str
    factor: float
    other: tuple[str, ...]
    at_least_bytes: int = 0

    @property
    def name(self) -> str:
        """For people."""
        larger = f" (from {self.at_least_bytes >> 20} MiB on)" if self.at_least_bytes else ""
        return f"{self.method} >= {self.factor} x {' and '.join(self.other)}{larger}"


BARS = (
    Bar("shm", 0.5, (MEMCPY,), _LARGE_BYTES),
    Bar("tcp", 0.9, (PLAIN,)),
    Bar("tcp", 1.3, (_JAX,)),
    Bar(_JAX, 1.0, tuple(PEERS)),
)


class TransferBench:
    """Both halves of each method that works here.

    Args:
        child: The sending process.
        methods: Names of the methods.
    """

    def __init__(self, child: Child, methods: Sequence[str]) -> None:
        self._child = child
        self._keys = itertools.count(1)
        self._targets: dict[str, Target] = {}
        for method in methods:
            try:
                target = make_target(method)
                target.connect(child("start", method=method))
            except (ChildError, RuntimeError, ValueError, OSError, ImportError) as error:
                print(f"skipped: {method} does not start: {error}")
            else:
                self._targets[method] = target

    @property
    def methods(self) -> list[str]:
        """The methods that were started."""
        return list(self._targets)

    def measure(self, payload: Payload, repeats: int) -> Medians:
        """Measures all methods with one payload.

        Args:
            payload: What to move.
            repeats: How often; small payloads more often.

        Returns:
            Median seconds by method.
        """
        self._child("load", num_bytes=payload.num_bytes, count=payload.count)
        for target in self._targets.values():
            target.prepare(payload)
        seconds: dict[str, list[float]] = {method: [] for method in self._targets}
        if payload.num_bytes <= _SMALL_BYTES:
            repeats *= _SMALL_FACTOR
        for repeat in range(_WARM_UPS + repeats):
            # In another order each time: what ran before leaves caches and threads behind.
            for method in random.Random(repeat).sample(self.methods, len(self._targets)):
                taken = self._move(method, payload, check=repeat == 0)
                if repeat >= _WARM_UPS:
                    seconds[method].append(taken)
        for target in self._targets.values():
            target.prepare(Payload(256, 1))  # Gives the memory back.
        return {method: statistics.median(each) for method, each in seconds.items()}

    def _move(self, method: str, payload: Payload, *, check: bool) -> float:
        key, target, specs = next(self._keys), self._targets[method], payload.specs()
        start = time.perf_counter()
        if method != MEMCPY:
            self._child("offer", method=method, key=key)
        arrays = target.receive(key, specs)
        seconds = time.perf_counter() - start
        if not all(is_ready(array) for array in arrays if isinstance(array, jax.Array)):
            raise RuntimeError(f"{method}: returned arrays that were not ready")
        if check:
            for index, array in enumerate(arrays):
                found = np.asarray(array).reshape(-1).view(np.uint8)
                if not np.array_equal(found, payload.content(index)):
                    raise RuntimeError(f"{method}: array {index} arrived with other bytes")
        if method != MEMCPY:
            self._child("release", method=method, key=key)
        return seconds


def handover_seconds(child: Child, engine: str, rounds: int) -> list[float]:
    """Measures hand-overs of one page between a prefill and a decode manager.

    Args:
        child: The process of the prefill manager.
        engine: Name of the transfer engine.
        rounds: How many to measure.

    Returns:
        Seconds of each, in ascending order.
    """
    side = DecodeSide(engine, child("start_prefill", engine=engine))
    seconds = []
    for room in range(1, _HANDOVER_WARM_UPS + rounds + 1):
        start = time.perf_counter()
        child.tell("hand_over", room=room)
        side.take_over(room)
        child.answer()
        seconds.append(time.perf_counter() - start)
    side.close()
    child("stop_prefill")
    return sorted(seconds[_HANDOVER_WARM_UPS:])


def table(results: Mapping[Payload, Medians], methods: Sequence[str]) -> str:
    """Formats GB/s, and in brackets the ratios to memcpy, to plain TCP and to `jax`.

    Args:
        results: Medians by payload.
        methods: The rows.

    Returns:
        Markdown.
    """
    payloads = list(results)
    header = ["GB/s (/ memcpy, / plain TCP, / jax)", *(payload.name for payload in payloads)]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for method in methods:
        cells = [method]
        for payload in payloads:
            medians = results[payload]
            ratios = [
                f"{medians[other] / medians[method]:.2f}" if other in medians else "-"
                for other in (MEMCPY, PLAIN, _JAX)
            ]
            speed = payload.num_bytes / medians[method] / 1e9
            cells.append(f"{speed:.2f} ({', '.join(ratios)})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(results: Mapping[Payload, Medians]) -> list[str]:
    """States for each bar whether it is met, and where it is not.

    Args:
        results: Medians by payload.

    Returns:
        A line per bar.
    """
    lines = []
    for bar in BARS:
        found = {
            payload.name: min(medians[each] for each in bar.other) / medians[bar.method]
            for payload, medians in results.items()
            if payload.num_bytes >= bar.at_least_bytes
            and all(each in medians for each in (bar.method, *bar.other))
        }
        below = {name: ratio for name, ratio in found.items() if ratio < bar.factor}
        if not found:
            state = "not measured"
        elif below:
            state = "missed: " + ", ".join(f"{n} {ratio:.2f}" for n, ratio in below.items())
        else:
            state = f"met; least {min(found.values()):.2f}"
        lines.append(f"- {bar.name}: {state}")
    return lines


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark.

    Args:
        argv: Program name only.

    Raises:
        app.UsageError: There are other arguments.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    engines = []
    for name in _ENGINES.value:
        if unknown_engine(name):
            print(f"skipped: no transfer engine is called {name}")
        else:
            engines.append(name)
    methods = [m for m in method_names(engines) if _RAW.value or m not in RAW]
    child = Child("kvferry.bench.transfer_source")
    try:
        bench = TransferBench(child, methods)
        results: dict[Payload, Medians] = {}
        for size, count in itertools.product(_SIZES_MIB.value, _COUNTS.value):
            payload = Payload(int(size) << 20, int(count))
            print(f"{payload.name} ..", file=sys.stderr)
            results[payload] = bench.measure(payload, _REPEATS.value)
        print(table(results, bench.methods))
        print("\n".join(["", *verdicts(results), ""]))
        plain = [engine for engine in engines if ":" not in engine]
        for engine in plain if _HANDOVERS.value else []:
            ordered = handover_seconds(child, engine, _HANDOVERS.value)
            p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
            state = "met" if p50 < _MAX_LATENCY_SECONDS else "missed"
            print(
                f"- hand-over of one page, {engine}: p50 {p50 * 1e3:.1f} ms, p99"
                f" {p99 * 1e3:.1f} ms (p50 < 10 ms: {state})"
            )
    finally:
        child.close()
    if _JSON.value:
        found = {payload.name: medians for payload, medians in results.items()}
        pathlib.Path(_JSON.value).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
