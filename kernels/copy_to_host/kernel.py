# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels: DMA between HBM and pinned host memory, all layers in one launch.

The host side of every DMA has a static index: Mosaic refuses a dynamic offset there for most
dtypes (jax-ml/jax#40200). The page in HBM is dynamic, so gather and scatter are part of the copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels import dispatch, memory

# DMAs in flight together, of any layer. One page each, so this hides the latency of one.
DEFAULT_WINDOW = 8

# Older compilers abort the process on a kernel with more than one output in host memory.
_MANY_HOST_OUTPUTS = (0, 0, 49)


def copies_to_host_by_layer() -> bool:
    """Whether the installed libtpu needs one launch for each layer on the way to the host."""
    return dispatch.libtpu_version() < _MANY_HOST_OUTPUTS


def _host_space(interpret: bool | pltpu.InterpretParams) -> Any:
    """Returns the space of host refs; the simulator knows no host memory."""
    return pltpu.HBM if interpret else pl.HOST


def _whole_kernel(
    src_hbm_ref: jax.Array, _: jax.Array, dest_host_ref: jax.Array, sem: jax.Array
) -> None:
    """Copies one whole array; the unused input is the destination that the output aliases."""
    copy = pltpu.make_async_copy(src_hbm_ref, dest_host_ref, sem)
    copy.start()
    copy.wait()


def copy_whole(
    src: jax.Array, dest: jax.Array, *, interpret: bool | pltpu.InterpretParams = False
) -> jax.Array:
    """Copies an array from HBM into a host array of the same shape, in place.

    Args:
      src: any shape, in HBM.
      dest: same shape and dtype, in pinned host memory; aliased to the output.
      interpret: simulate the kernel on the CPU.

    Returns:
      The updated destination.
    """
    host = pl.BlockSpec(memory_space=_host_space(interpret))
    (src,) = memory.keep_in_hbm([src], interpret)
    return pl.pallas_call(
        _whole_kernel,
        out_shape=jax.ShapeDtypeStruct(dest.shape, dest.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM), host],
        out_specs=host,
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        input_output_aliases={1: 0},
        interpret=interpret,
        name="copy_to_host",
    )(src, dest)


def _pages_kernel(
    # Inputs, scalars
    page_ids_smem_ref: jax.Array,  # [n] int32
    num_pages_smem_ref: jax.Array,  # [1] int32
    # Inputs: sources, then the aliased destinations; outputs: the destinations; scratch: one DMA
    # semaphore per page in flight.
    *refs: jax.Array,
    num_layers: int,
    window: int,
    to_host: bool,
) -> None:
    """Moves page `i` of a slot from or to page `page_ids[i]` of the pool, `window` at a time."""
    src_refs = refs[:num_layers]
    dest_refs = refs[2 * num_layers : 3 * num_layers]
    sems = refs[-1]
    steps = [
        (row, layer) for row in range(page_ids_smem_ref.shape[0]) for layer in range(num_layers)
    ]

    def when_used(step: int, slot: int, act: Callable[[Any], None]) -> None:
        row, layer = steps[step]

        @pl.when(row < num_pages_smem_ref[0])
        def _() -> None:
            page = page_ids_smem_ref[row]
            src_row, dest_row = (page, row) if to_host else (row, page)
            act(
                pltpu.make_async_copy(
                    src_refs[layer].at[src_row],
                    dest_refs[layer].at[dest_row],
                    sems.at[slot],
                )
            )

    for step in range(len(steps)):
        if step >= window:
            # Frees the semaphore that this step is about to use.
            when_used(step - window, step % window, lambda copy: copy.wait())
        when_used(step, step % window, lambda copy: copy.start())
    for step in range(max(0, len(steps) - window), len(steps)):
        when_used(step, step % window, lambda copy: copy.wait())


def copy_pages(
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    page_ids: jax.Array,
    num_pages: jax.Array,
    *,
    to_host: bool,
    window: int = DEFAULT_WINDOW,
    interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
    """Copies pages between the pools of all layers and a slot of host arrays, in place.

    Args:
      src_array: per layer, the pool [pool_pages, ...] in HBM (`to_host`) or the slot
        [slot_pages, ...] in host memory.
      dest_array: per layer, the other one; aliased to the outputs.
      page_ids: page of the pool for row i of the slot, [n] int32, n <= slot_pages.
      num_pages: how many of them are valid, [1] int32.
      to_host: direction.
      window: DMAs in flight together, at least 1.
      interpret: simulate the kernel on the CPU.

    Returns:
      The updated destinations. One launch for all layers; one for each layer on the way to the
      host with a libtpu before 0.0.49.
    """
    num_layers = len(src_array)
    if to_host:
        src_array = memory.keep_in_hbm(src_array, interpret)
        if num_layers > 1 and not interpret and copies_to_host_by_layer():
            return [
                layer
                for src, dest in zip(src_array, dest_array, strict=True)
                for layer in copy_pages(
                    [src], [dest], page_ids, num_pages, to_host=True, window=window
                )
            ]
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    host = pl.BlockSpec(memory_space=_host_space(interpret))
    src_spec, dest_spec = (hbm, host) if to_host else (host, hbm)
    return list(
        pl.pallas_call(
            functools.partial(_pages_kernel, num_layers=num_layers, window=window, to_host=to_host),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in dest_array],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(),
                in_specs=[src_spec] * num_layers + [dest_spec] * num_layers,
                out_specs=[dest_spec] * num_layers,
                scratch_shapes=[pltpu.SemaphoreType.DMA((window,))],
            ),
            input_output_aliases={2 + num_layers + i: i for i in range(num_layers)},
            interpret=interpret,
            name="copy_pages_to_host" if to_host else "copy_to_device",
        )(page_ids, num_pages, *src_array, *dest_array)
    )
