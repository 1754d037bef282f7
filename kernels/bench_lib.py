# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the kernels share: timing, the baseline, the table, what it is worth."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a benchmark's table.

    Attributes:
      spec: name of the shapes.
      operation: what was timed.
      moved_bytes: bytes that arrived at their destination.
      seconds: median time of one call, until the bytes are there.
      baseline_seconds: median time of `numpy.copyto` for as many bytes, or None.
      traffic_factor: HBM bytes read and written per byte moved.
    """

    spec: str
    operation: str
    moved_bytes: int
    seconds: float
    baseline_seconds: float | None = None
    traffic_factor: int = 2

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes moved, not bytes read plus written, per time."""
        return self.moved_bytes / self.seconds / 1e9


def median_seconds(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Times functions in turn, so that a disturbance does not hit only one of them.

    Args:
      runs: functions that return arrays, or nothing; each is called once more to warm up.
      repeats: calls that count.

    Returns:
      The median time of each, in seconds.
    """
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            jax.block_until_ready(run())
            elapsed = time.perf_counter() - start
            if repeat:
                times[index].append(elapsed)
    return [statistics.median(each) for each in times]


def copyto(layers: int, layer_bytes: int) -> Callable[[], None]:
    """Returns a function that copies as many bytes between host arrays with numpy.

    Args:
      layers: arrays to copy.
      layer_bytes: bytes of each.

    Returns:
      The function; its arrays are allocated and touched already.
    """
    sources = [np.full(layer_bytes, 1, np.uint8) for _ in range(layers)]
    dests = [np.full(layer_bytes, 2, np.uint8) for _ in range(layers)]

    def run() -> None:
        for dest, source in zip(dests, sources, strict=True):
            np.copyto(dest, source)

    return run


def hbm_bytes_per_second(device: Any) -> float | None:
    """Returns the peak HBM bandwidth of a device as JAX knows it, None without HBM."""
    if device.platform != "tpu":
        return None
    return float(pltpu.get_tpu_info().mem_bw_bytes_per_second)


def heading(device: Any) -> str:
    """Says what the figures were measured on and what they are worth.

    Args:
      device: the device that the benchmark runs on.

    Returns:
      One or two lines.
    """
    where = f"{device.platform}: {device.device_kind}, jax {jax.__version__}"
    peak = hbm_bytes_per_second(device)
    if peak is None:
        return f"{where}\nNot a TPU: these figures say nothing about TPU."
    return f"{where}, HBM peak {peak / 1e9:.0f} GB/s"


def table(rows: Sequence[Row], peak_bytes_per_second: float | None) -> str:
    """Formats rows.

    Args:
      rows: what was measured.
      peak_bytes_per_second: HBM bandwidth, to print the fraction reached; None: no such column.

    Returns:
      A Markdown table: bytes, ms, GB/s, ratio to the baseline or fraction of the peak.
    """
    last = "of numpy.copyto" if peak_bytes_per_second is None else "of HBM peak"
    lines = [
        f"| shapes | operation | MB moved | ms | GB/s | {last} |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        share = "-"
        if peak_bytes_per_second is not None and row.traffic_factor:
            traffic = row.traffic_factor * row.moved_bytes / row.seconds
            share = f"{traffic / peak_bytes_per_second:.2f}"
        elif peak_bytes_per_second is None and row.baseline_seconds is not None:
            share = f"{row.baseline_seconds / row.seconds:.2f}"
        lines.append(
            f"| {row.spec} | {row.operation} | {row.moved_bytes / 1e6:.1f} | "
            f"{row.seconds * 1e3:.2f} | {row.gigabytes_per_second:.2f} | {share} |"
        )
    return "\n".join(lines)
