# SPDX-License-Identifier: Apache-2.0
"""Pallas kernel: pages of all layers by DMA from HBM to HBM, in one launch.

The idea of chunked copies with dynamic offsets is that of tpu-inference's `kv_transfer`, which
starts and waits in kernels of their own, two launches per layer. Here one kernel does both, with
a window of layers in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels import memory
from kvferry.kernels.chunks import Chunks

# Layers whose DMAs are in flight together. More hide the latency of a layer with few chunks; each
# costs one semaphore and room in the DMA queues.
DEFAULT_WINDOW = 8


def _copy_in_window(
    src_hbm_refs: Sequence[jax.Array],
    dest_hbm_refs: Sequence[jax.Array],
    sems: jax.Array,
    count: jax.Array,
    run_of: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array | int]],
) -> None:
    """Copies all layers with as many in flight as there are semaphores.

    Starts layer `l + window` only after all DMAs of layer `l` have arrived.

    Args:
      src_hbm_refs: one ref per layer.
      dest_hbm_refs: one ref per layer.
      sems: DMA semaphores, [window].
      count: chunks per layer.
      run_of: first source page, first destination page and pages of a chunk.
    """
    num_layers, window = len(src_hbm_refs), sems.shape[0]

    def for_each_chunk(layer: int, slot: int, act: Callable[[Any], None]) -> None:
        @pl.loop(0, count)
        def _(chunk: jax.Array) -> None:
            src, dest, size = run_of(chunk)

            @pl.when(size > 0)
            def _() -> None:
                # A semaphore counts bytes: a wait must name the same size as its start.
                act(
                    pltpu.make_async_copy(
                        src_hbm_refs[layer].at[pl.ds(src, size)],
                        dest_hbm_refs[layer].at[pl.ds(dest, size)],
                        sems.at[slot],
                    )
                )

    for layer in range(min(window, num_layers)):
        for_each_chunk(layer, layer % window, lambda copy: copy.start())
    for layer in range(num_layers):
        for_each_chunk(layer, layer % window, lambda copy: copy.wait())
        # The semaphore of `layer` counts zero again, so the next layer can have it.
        if layer + window < num_layers:
            for_each_chunk(layer + window, layer % window, lambda copy: copy.start())


def _copy_kernel(
    # Inputs, scalars
    src_offsets_smem_ref: jax.Array,  # [n] int32
    dest_offsets_smem_ref: jax.Array,  # [n] int32
    sizes_smem_ref: jax.Array,  # [n] int32
    num_chunks_smem_ref: jax.Array,  # [1] int32
    # Inputs in HBM: sources, then the destinations, which the outputs alias; outputs; scratch: one
    # DMA semaphore per layer in flight.
    *refs: jax.Array,
    num_layers: int,
) -> None:
    """Copies runs of pages."""
    count = jnp.minimum(num_chunks_smem_ref[0], sizes_smem_ref.shape[0])

    def run_of(chunk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return src_offsets_smem_ref[chunk], dest_offsets_smem_ref[chunk], sizes_smem_ref[chunk]

    _copy_in_window(refs[:num_layers], refs[2 * num_layers : -1], refs[-1], count, run_of)


def _gather_kernel(
    # Inputs, scalars
    page_ids_smem_ref: jax.Array,  # [n] int32
    num_pages_smem_ref: jax.Array,  # [1] int32
    # Inputs in HBM: sources; outputs; scratch: one DMA semaphore per layer in flight.
    *refs: jax.Array,
    num_layers: int,
) -> None:
    """Copies single pages to consecutive ones."""
    count = jnp.minimum(num_pages_smem_ref[0], page_ids_smem_ref.shape[0])

    def run_of(chunk: jax.Array) -> tuple[jax.Array, jax.Array, int]:
        return page_ids_smem_ref[chunk], chunk, 1

    _copy_in_window(refs[:num_layers], refs[num_layers:-1], refs[-1], count, run_of)


def copy_layers(
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    chunks: Chunks,
    *,
    window: int = DEFAULT_WINDOW,
    interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
    """Copies runs of pages of every layer into that layer's destination, in place.

    Args:
      src_array: one array per layer, [src_pages, ...].
      dest_array: one array per layer, [dest_pages, ...]; aliased to the outputs.
      chunks: the runs; a size of 0 is a run that is skipped.
      window: layers in flight together, at least 1.
      interpret: simulate the kernel on the CPU.

    Returns:
      The updated destinations.
    """
    num_layers = len(src_array)
    num_scalars = len(chunks)
    # Not the destinations: libtpu 0.0.42 refuses outputs that alias a pinned input.
    src_array = memory.keep_in_hbm(src_array, interpret)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return list(
        pl.pallas_call(
            functools.partial(_copy_kernel, num_layers=num_layers),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in dest_array],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=num_scalars,
                grid=(),
                in_specs=[hbm] * (2 * num_layers),
                out_specs=[hbm] * num_layers,
                scratch_shapes=[pltpu.SemaphoreType.DMA((window,))],
            ),
            input_output_aliases={num_scalars + num_layers + i: i for i in range(num_layers)},
            interpret=interpret,
            name="multi_layer_copy",
        )(*chunks, *src_array, *dest_array)
    )


def gather_layers(
    src_array: Sequence[jax.Array],
    page_ids: jax.Array,
    num_pages: jax.Array,
    *,
    window: int = DEFAULT_WINDOW,
    interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
    """Copies single pages of every layer into fresh arrays.

    Args:
      src_array: one array per layer, [src_pages, ...].
      page_ids: pages wanted, [n] int32.
      num_pages: how many of them are valid, [1] int32.
      window: layers in flight together, at least 1.
      interpret: simulate the kernel on the CPU.

    Returns:
      One [n, ...] array per layer; rows at and beyond `num_pages` are uninitialised memory.
    """
    num_layers = len(src_array)
    src_array = memory.keep_in_hbm(src_array, interpret)
    count = page_ids.shape[0]
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return list(
        pl.pallas_call(
            functools.partial(_gather_kernel, num_layers=num_layers),
            out_shape=[jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) for x in src_array],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(),
                in_specs=[hbm] * num_layers,
                out_specs=[hbm] * num_layers,
                scratch_shapes=[pltpu.SemaphoreType.DMA((window,))],
            ),
            interpret=interpret,
            name="multi_layer_gather",
        )(page_ids, num_pages, *src_array)
    )
