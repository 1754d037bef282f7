# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and say what their figures are worth."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels import bench_lib
from kvferry.kernels.copy_to_host import bench as host_bench
from kvferry.kernels.multi_layer_copy import bench as copy_bench
from kvferry.kernels.multi_layer_copy.arg_specs import ArgSpec

_TINY = ArgSpec(name="tiny", layers=2, page=(4, 128), dtype="uint16", pool_pages=8, pages=4)


def test_spec_counts_bytes() -> None:
    assert _TINY.layer_bytes == 4 * 4 * 128 * 2
    assert _TINY.moved_bytes == 2 * _TINY.layer_bytes


def test_multi_layer_copy_is_timed() -> None:
    rows = copy_bench.measure(_TINY, repeats=2, window=2, large_pool_factor=3)
    assert [row.operation for row in rows] == [
        "scatter",
        "gather",
        "gather, new arrays",
        "scatter, pool x 3",
        "gather, pool x 3",
    ]
    assert all(row.moved_bytes == _TINY.moved_bytes and row.seconds > 0 for row in rows)


def test_copy_to_host_is_timed() -> None:
    rows = host_bench.measure(_TINY, repeats=2, window=2)
    assert [row.operation for row in rows] == [
        "gather_to_host",
        "copy_to_device",
        "copy_to_host, each layer",
    ]
    assert all(row.baseline_seconds for row in rows)


def test_table() -> None:
    row = bench_lib.Row(
        spec="s", operation="scatter", moved_bytes=10**9, seconds=0.5, baseline_seconds=0.4
    )
    on_cpu, on_tpu = bench_lib.table([row], None), bench_lib.table([row], 8e9)
    assert on_cpu.splitlines()[0].endswith("| of numpy.copyto |")
    assert on_cpu.splitlines()[2] == "| s | scatter | 1000.0 | 500.00 | 2.00 | 0.80 |"
    assert on_tpu.splitlines()[0].endswith("| of HBM peak |")
    # Each byte that moves is read and written: 4 GB/s of traffic.
    assert on_tpu.splitlines()[2] == "| s | scatter | 1000.0 | 500.00 | 2.00 | 0.50 |"


class _Tpu:
    platform = "tpu"
    device_kind = "TPU v5 lite"


def test_heading_says_what_the_figures_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "these figures say nothing about TPU" in bench_lib.heading(jax.devices()[0])
    info: Any = type("Info", (), {"mem_bw_bytes_per_second": 819e9})
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: info)
    assert bench_lib.heading(_Tpu()).endswith("HBM peak 819 GB/s")


@pytest.mark.parametrize("module", ["multi_layer_copy", "copy_to_host"])
def test_program(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"kvferry.kernels.{module}.bench", "--spec=none such"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "these figures say nothing about TPU" in result.stdout
    assert "| shapes | operation | MB moved | ms | GB/s | of numpy.copyto |" in result.stdout
