# SPDX-License-Identifier: Apache-2.0
"""Times the copies between device pools and host slots, on whatever device there is.

python -m kvferry.kernels.copy_to_host.bench
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import SingleDeviceSharding

from kvferry.kernels import bench_lib, programs
from kvferry.kernels.copy_to_host import arg_specs
from kvferry.kernels.copy_to_host.api import copy_to_device, copy_to_host, gather_to_host
from kvferry.kernels.copy_to_host.kernel import DEFAULT_WINDOW
from kvferry.kernels.multi_layer_copy.arg_specs import ArgSpec

_FLAGS = programs.own_flags()
_REPEATS = flags.DEFINE_integer(
    "repeats", 15, "Calls that are timed; the median counts.", flag_values=_FLAGS
)
_WINDOW = flags.DEFINE_integer(
    "window", DEFAULT_WINDOW, "Pages in flight together, on TPU.", flag_values=_FLAGS
)
_SPEC = flags.DEFINE_string(
    "spec", "", "Only the shapes whose name contains this.", flag_values=_FLAGS
)


class _Arrays:
    """Pools and a slot of one spec; what is donated is replaced by what came back."""

    def __init__(self, spec: ArgSpec, window: int) -> None:
        self._window = window
        host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        self._pools = self._layers(spec, spec.pool_pages)
        self._slot = [jax.device_put(x, host) for x in self._layers(spec, spec.pages)]
        self._whole = self._layers(spec, spec.pages)
        self._ids = np.random.default_rng(0).permutation(spec.pool_pages)[: spec.pages]

    def _layers(self, spec: ArgSpec, pages: int) -> list[jax.Array]:
        return [jnp.ones((pages, *spec.page), spec.dtype) for _ in range(spec.layers)]

    def to_host(self) -> Any:
        """Pages of all pools into the slot, in one launch."""
        self._slot = gather_to_host(self._pools, self._slot, self._ids, window=self._window)
        return self._slot

    def to_device(self) -> Any:
        """The slot back into pages of all pools, in one launch."""
        self._pools = copy_to_device(self._slot, self._pools, self._ids, window=self._window)
        return self._pools

    def whole(self) -> Any:
        """One array after the other, as a caller that gathered before would."""
        pairs = zip(self._whole, self._slot, strict=True)
        self._slot = [copy_to_host(source, dest) for source, dest in pairs]
        return self._slot


def measure(spec: ArgSpec, *, repeats: int, window: int) -> list[bench_lib.Row]:
    """Times one spec.

    Args:
      spec: the shapes; `pages` is the size of the slot.
      repeats: calls that are timed.
      window: pages in flight together (Pallas only).

    Returns:
      One row per operation.
    """
    arrays = _Arrays(spec, window)
    runs: dict[str, Callable[[], Any]] = {
        "gather_to_host": arrays.to_host,
        "copy_to_device": arrays.to_device,
        "copy_to_host, each layer": arrays.whole,
    }
    baseline = bench_lib.copyto(spec.layers, spec.layer_bytes)
    *seconds, baseline_seconds = bench_lib.median_seconds([*runs.values(), baseline], repeats)
    return [
        bench_lib.Row(
            spec=spec.name,
            operation=operation,
            moved_bytes=spec.moved_bytes,
            seconds=median,
            baseline_seconds=baseline_seconds,
            # One side is host memory: the link to the host is the limit, not HBM.
            traffic_factor=1,
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
            rows += measure(spec, repeats=_REPEATS.value, window=_WINDOW.value)
    print(bench_lib.heading(device))
    print(bench_lib.table(rows, bench_lib.hbm_bytes_per_second(device)))


if __name__ == "__main__":
    programs.run(main, _FLAGS)
