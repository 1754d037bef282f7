# SPDX-License-Identifier: Apache-2.0
"""Times multi_layer_copy between a pool and contiguous pages, on whatever device there is.

python -m kvferry.kernels.multi_layer_copy.bench
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvferry.kernels import bench_lib, programs
from kvferry.kernels.multi_layer_copy import arg_specs
from kvferry.kernels.multi_layer_copy.api import gather_pages, multi_layer_copy, scatter_pages
from kvferry.kernels.multi_layer_copy.arg_specs import ArgSpec
from kvferry.kernels.multi_layer_copy.kernel import DEFAULT_WINDOW

_FLAGS = programs.own_flags()
_REPEATS = flags.DEFINE_integer(
    "repeats", 15, "Calls that are timed; the median counts.", flag_values=_FLAGS
)
_WINDOW = flags.DEFINE_integer(
    "window", DEFAULT_WINDOW, "Layers in flight together, on TPU.", flag_values=_FLAGS
)
_SPEC = flags.DEFINE_string(
    "spec", "", "Only the shapes whose name contains this.", flag_values=_FLAGS
)
_LARGE_POOL_FACTOR = flags.DEFINE_integer(
    "large_pool_factor",
    10,
    "Repeat the scatter with a pool this many times larger; 0: do not.",
    flag_values=_FLAGS,
)


class _Pools:
    """Arrays of one spec; what is donated is replaced by what came back."""

    def __init__(self, spec: ArgSpec, window: int) -> None:
        self._window = window
        self._pools = self._layers(spec, spec.pool_pages)
        self._pages = self._layers(spec, spec.pages)
        rng = np.random.default_rng(0)
        self._ids = rng.permutation(spec.pool_pages)[: spec.pages].astype(np.int32)
        self._rows = np.arange(spec.pages, dtype=np.int32)
        self._ones = np.ones(spec.pages, np.int32)

    def _layers(self, spec: ArgSpec, pages: int) -> list[jax.Array]:
        shape = (pages, *spec.page)
        return [jnp.ones(shape, spec.dtype) for _ in range(spec.layers)]

    def scatter(self) -> Any:
        """Contiguous pages into the pool, in place."""
        self._pools = scatter_pages(self._pages, self._pools, self._ids)
        return self._pools

    def gather(self) -> Any:
        """Pages of the pool into contiguous arrays that exist already."""
        self._pages = multi_layer_copy(
            src_array=self._pools,
            dest_array=self._pages,
            src_offsets=self._ids,
            dest_offsets=self._rows,
            chunk_sizes=self._ones,
            window=self._window,
        )
        return self._pages

    def fresh_gather(self) -> Any:
        """Pages of the pool into new arrays, whose allocation counts."""
        return gather_pages(self._pools, self._ids)


def measure(
    spec: ArgSpec, *, repeats: int, window: int, large_pool_factor: int
) -> list[bench_lib.Row]:
    """Times one spec.

    Args:
      spec: the shapes.
      repeats: calls that are timed.
      window: layers in flight together (Pallas only).
      large_pool_factor: also use a pool this many times larger; 0: do not.

    Returns:
      One row per operation.
    """
    pools = _Pools(spec, window)
    runs: dict[str, Callable[[], Any]] = {
        "scatter": pools.scatter,
        "gather": pools.gather,
        "gather, new arrays": pools.fresh_gather,
    }
    if large_pool_factor:
        large_spec = dataclasses.replace(spec, pool_pages=large_pool_factor * spec.pool_pages)
        large = _Pools(large_spec, window)
        runs[f"scatter, pool x {large_pool_factor}"] = large.scatter
        runs[f"gather, pool x {large_pool_factor}"] = large.gather
    baseline = bench_lib.copyto(spec.layers, spec.layer_bytes)
    *seconds, baseline_seconds = bench_lib.median_seconds([*runs.values(), baseline], repeats)
    return [
        bench_lib.Row(
            spec=spec.name,
            operation=operation,
            moved_bytes=spec.moved_bytes,
            seconds=median,
            baseline_seconds=baseline_seconds,
        )
        for operation, median in zip(runs, seconds, strict=True)
    ]


def main(argv: Sequence[str]) -> None:
    """Prints the table.

    Args:
      argv: the program's name only.
    """
    del argv
    device = jax.devices()[0]
    specs = arg_specs.TPU if device.platform == "tpu" else arg_specs.CPU
    rows = []
    for spec in specs:
        if _SPEC.value in spec.name:
            rows += measure(
                spec,
                repeats=_REPEATS.value,
                window=_WINDOW.value,
                large_pool_factor=_LARGE_POOL_FACTOR.value,
            )
    print(bench_lib.heading(device))
    print(bench_lib.table(rows, bench_lib.hbm_bytes_per_second(device)))


if __name__ == "__main__":
    programs.run(main, _FLAGS)
