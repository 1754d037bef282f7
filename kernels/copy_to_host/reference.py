# SPDX-License-Identifier: Apache-2.0
"""The copies between HBM and host memory in plain XLA: oracle of the tests and path without a TPU.

On CPU all memory kinds are the same memory and XLA computes on host arrays directly. Elsewhere it
cannot, so a host array is brought to the device first and the result goes back by the caller's
`out_shardings`: right, but not what a kernel does; see `kernel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvferry.kernels.chunks import Chunks
from kvferry.kernels.dispatch import Form
from kvferry.kernels.multi_layer_copy import reference


def copy_whole(src: jax.Array, dest: jax.Array) -> jax.Array:
    """Returns `src` in a form that can take the donated buffer of `dest`.

    Args:
      src: any shape.
      dest: same shape and dtype; donated by the caller's jit.

    Returns:
      The copy.
    """
    # Every element is taken from src, but dest stays an operand: otherwise XLA would drop it, and
    # with it the donation.
    return jnp.where(jnp.zeros((), jnp.bool_), dest, src)


def copy_pages(
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    page_ids: jax.Array,
    num_pages: jax.Array,
    *,
    to_host: bool,
    form: Form = "fastest",
    as_bits: bool = False,
) -> list[jax.Array]:
    """Copies pages between the pools of all layers and a slot.

    Args:
      src_array: per layer, the pool [pool_pages, ...] (`to_host`) or the slot [slot_pages, ...].
      dest_array: per layer, the other one.
      page_ids: page of the pool for row i of the slot, [n] int32, n <= slot_pages.
      num_pages: how many of them are valid, [1] int32.
      to_host: direction.
      form: "fastest" on CPU, "page_loop" on TPU.
      as_bits: move bfloat16 and float8 as unsigned integers (for XLA's CPU compiler).

    Returns:
      The updated destinations.
    """
    count = page_ids.shape[0]
    rows = jnp.arange(count, dtype=jnp.int32)
    ones = jnp.ones(count, jnp.int32)
    src_rows, dest_rows = (page_ids, rows) if to_host else (rows, page_ids)
    chunks = Chunks(src_rows, dest_rows, ones, num_pages)
    return reference.copy_layers(src_array, dest_array, chunks, form=form, as_bits=as_bits)
