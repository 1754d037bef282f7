# SPDX-License-Identifier: Apache-2.0
"""Where XLA keeps the arrays that a kernel's DMAs read and write."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental.pallas import tpu as pltpu


def keep_in_hbm(
    arrays: Sequence[jax.Array], interpret: bool | pltpu.InterpretParams
) -> list[jax.Array]:
    """Pins arrays to HBM for the kernel that uses them.

    On tpu7x XLA would bring a source of some megabytes into VMEM before the kernel starts: the
    same bytes moved once more, and not overlapped with anything.

    Args:
      arrays: operands of a kernel.
      interpret: the kernel is simulated; then there is only one memory.

    Returns:
      The same values.
    """
    if interpret:
        return list(arrays)
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
