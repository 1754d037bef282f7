# SPDX-License-Identifier: Apache-2.0
"""What a kernel module has to pass: run on the real kernels, and on mutants that must fail."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels.chunks import Chunks
from kvferry.tests.kernels import oracle
from kvferry.tests.kernels.oracle import Run
from kvferry.tests.kernels.simulator import watched

Check = Callable[[ModuleType, pltpu.InterpretParams], None]

_PAGE = (4, 128)
# Beyond the valid runs: would overwrite pages that nothing else touches, or leave the pool.
_POISON = [Run(0, 1), Run(2, 9, 2), Run(99, 99, 99)]


def _int32(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def _run_copy(
    kernel: ModuleType,
    params: pltpu.InterpretParams,
    *,
    src: oracle.Arrays,
    dest: oracle.Arrays,
    runs: list[Run],
    window: int,
) -> None:
    """Copies valid runs followed by poison, and compares every page of every layer."""
    chunks = Chunks(*(jnp.asarray(array) for array in oracle.chunks(runs + _POISON, len(runs))))
    with watched(params):
        results = jax.block_until_ready(
            kernel.copy_layers(
                oracle.device(src), oracle.device(dest), chunks, window=window, interpret=params
            )
        )
    oracle.assert_equal(results, oracle.copied(src, dest, runs))


def scatter_runs(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """More layers than the window, runs of several lengths, layers of several sizes."""
    src = oracle.layers(6, _PAGE, 5) + oracle.layers(6, (8, 128), 1)
    dest = oracle.layers(12, _PAGE, 5, seed=1) + oracle.layers(12, (8, 128), 1, seed=1)
    runs = [Run(0, 4), Run(1, 10, 2), Run(3, 6, 3)]
    _run_copy(kernel, params, src=src, dest=dest, runs=runs, window=2)


def gather_runs(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """From the pool to a contiguous array, with a source page that is used twice."""
    src = oracle.layers(12, _PAGE, 3)
    dest = oracle.layers(12, _PAGE, 3, seed=1)
    runs = [Run(7, 0), Run(2, 2, 3), Run(7, 5)]
    _run_copy(kernel, params, src=src, dest=dest, runs=runs, window=4)


def no_runs(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """Nothing is valid: nothing changes."""
    src, dest = oracle.layers(3, _PAGE, 2), oracle.layers(12, _PAGE, 2, seed=1)
    _run_copy(kernel, params, src=src, dest=dest, runs=[], window=2)


def fresh_gather(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """Into arrays that the kernel allocates."""
    src = oracle.layers(9, _PAGE, 3)
    ids = [5, 0, 8, 5, 77, 77]
    with watched(params):
        results = jax.block_until_ready(
            kernel.gather_layers(
                oracle.device(src), _int32(*ids), _int32(4), window=2, interpret=params
            )
        )
    oracle.assert_equal([result[:4] for result in results], [array[ids[:4]] for array in src])


MULTI_LAYER_COPY: dict[str, Check] = {
    check.__name__: check for check in (scatter_runs, gather_runs, no_runs, fresh_gather)
}


def _run_pages(
    kernel: ModuleType,
    params: pltpu.InterpretParams,
    *,
    to_host: bool,
    ids: list[int],
    valid: int,
    window: int,
) -> None:
    """Copies pages between pools and a slot of three layers, one of another shape."""
    pools = oracle.layers(8, _PAGE, 2) + oracle.layers(8, (8, 128), 1)
    slots = oracle.layers(6, _PAGE, 2, seed=1) + oracle.layers(6, (8, 128), 1, seed=1)
    src, dest = (pools, slots) if to_host else (slots, pools)
    with watched(params):
        results = jax.block_until_ready(
            kernel.copy_pages(
                oracle.device(src),
                oracle.device(dest),
                _int32(*ids),
                _int32(valid),
                to_host=to_host,
                window=window,
                interpret=params,
            )
        )
    rows = [(page, row) if to_host else (row, page) for row, page in enumerate(ids[:valid])]
    runs = [Run(source, target) for source, target in rows]
    oracle.assert_equal(results, oracle.copied(src, dest, runs))


def pages_to_host(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """A page asked for twice; the last entries are not valid; fewer entries than the slot has."""
    _run_pages(kernel, params, to_host=True, ids=[6, 1, 6, 3, 7], valid=4, window=2)


def pages_to_device(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """The way back, with a window that is no divisor of the number of pages."""
    _run_pages(kernel, params, to_host=False, ids=[6, 1, 0, 3, 7], valid=4, window=5)


def no_pages(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """No entry is valid."""
    _run_pages(kernel, params, to_host=True, ids=[6, 1], valid=0, window=8)


def whole_array(kernel: ModuleType, params: pltpu.InterpretParams) -> None:
    """One array of the same shape."""
    src, dest = oracle.layers(3, _PAGE, 1), oracle.layers(3, _PAGE, 1, seed=1)
    with watched(params):
        result = kernel.copy_whole(*oracle.device(src), *oracle.device(dest), interpret=params)
        jax.block_until_ready(result)
    oracle.assert_equal([result], src)


COPY_TO_HOST: dict[str, Check] = {
    check.__name__: check for check in (pages_to_host, pages_to_device, no_pages, whole_array)
}
