# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel in the TPU simulator and tells what went wrong besides the result.

The only place that touches a private module of JAX: whether the simulator saw a race is told
nowhere else.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

# Each catches a mistake that the others miss: a missing wait shows in the values when DMAs run at
# their wait, and as a race when they run at once.
PARAMS = [
    pltpu.InterpretParams(dma_execution_mode=mode, detect_races=races)
    for mode in ("eager", "on_wait")
    for races in (False, True)
]


def params_id(params: pltpu.InterpretParams) -> str:
    return params.dma_execution_mode + ("+races" if params.detect_races else "")


class SimulationError(AssertionError):
    """The simulated kernel raced, or left a semaphore that is not zero."""


@contextlib.contextmanager
def watched(params: pltpu.InterpretParams) -> Iterator[None]:
    """Fails the block if a kernel in it races or leaves a semaphore that is not zero.

    The block must wait for its results.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            yield
        races = interpret_pallas_call.races
    finally:
        # After an exception the simulator would otherwise stay as it was.
        pltpu.reset_tpu_interpret_mode_state()
    if params.detect_races:
        if races is None:
            raise SimulationError("no kernel was simulated")
        if races.races_found:
            raise SimulationError(f"race: {output.getvalue()[:1000]}")
    if "non-zero count" in output.getvalue():
        raise SimulationError(output.getvalue()[:1000])


def wait(arrays: list[jax.Array]) -> list[jax.Array]:
    return jax.block_until_ready(arrays)
