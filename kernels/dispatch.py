# SPDX-License-Identifier: Apache-2.0
"""Choice of the implementation of a kernel."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental.pallas import tpu as pltpu

Implementation = Literal["mosaic_tpu", "xla"]
Interpret = bool | pltpu.InterpretParams
# How the XLA reference moves pages, see multi_layer_copy/reference.py.
Form = Literal["fastest", "page_loop"]


def normalise_interpret(interpret: Interpret) -> Interpret:
    """Maps True to the TPU simulator: the generic interpreter cannot do chunks of dynamic size."""
    return pltpu.InterpretParams() if interpret is True else interpret


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    """Logs a message the first time that it is given."""
    logging.warning("%s", message)


def choose(
    kernel: str,
    implementation: Implementation | None,
    interpret: Interpret,
    platform: str,
    layout_problem: str | None,
) -> Implementation:
    """Picks the implementation of a call.

    Args:
      kernel: name of the kernel, for messages.
      implementation: the caller's wish; None takes the best that runs.
      interpret: the caller asked for a simulated Pallas kernel.
      platform: where the arrays are.
      layout_problem: why a layer's layout cannot move in place, or None.

    Returns:
      "mosaic_tpu" or "xla".

    Raises:
      ValueError: unknown implementation, or `interpret` with "xla".
      NotImplementedError: "mosaic_tpu" was asked for and cannot run.
    """
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(
            f"implementation = {implementation!r} is unknown; use one of "
            f"{(None, *get_args(Implementation))}."
        )
    if implementation == "xla":
        if interpret:
            raise ValueError("interpret is for implementation='mosaic_tpu', got 'xla'.")
        return "xla"
    if interpret:
        return "mosaic_tpu"
    if platform != "tpu":
        if implementation is None:
            return "xla"
        raise NotImplementedError(
            f"{kernel}: the Pallas kernel needs a TPU, the arrays are on {platform!r}; pass "
            "interpret=pltpu.InterpretParams() to simulate it, or implementation='xla'."
        )
    if layout_problem is None:
        return "mosaic_tpu"
    if implementation == "mosaic_tpu":
        raise NotImplementedError(f"{kernel}: {layout_problem}.")
    _warn_once(f"{kernel}: moving pages one by one with XLA, because {layout_problem}.")
    return "xla"


@functools.lru_cache(maxsize=1)
def libtpu_version() -> tuple[int, ...]:
    """Returns the version of the installed TPU compiler, as numbers; large without one.

    Without one there is nothing to compile for; a compiler that came by other ways than a package
    is taken for a new one.
    """
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return (1 << 30,)
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def xla_form(platform: str) -> Form:
    """Returns the form of the XLA reference that leaves pools in place on this platform."""
    return "page_loop" if platform == "tpu" else "fastest"


def is_emulated_float(dtype: np.dtype) -> bool:
    """Says whether XLA's CPU compiler converts this dtype to float32, even to move it."""
    native = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float16), jnp.dtype(jnp.float64))
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype) not in native


def move_bits(platform: str, dtypes: Sequence[np.dtype]) -> bool:
    """Decides whether XLA moves integers instead of floats, and tells once what that costs.

    Args:
      platform: where the arrays are.
      dtypes: dtypes of the destinations.

    Returns:
      True on CPU when a dtype is one that XLA's CPU compiler converts to float32 and back.
    """
    slow = sorted({str(x) for x in dtypes if is_emulated_float(x)})
    if platform != "cpu" or not slow:
        return False
    _warn_once(
        f"On CPU, writing into a pool of dtype {', '.join(slow)} makes XLA copy the whole pool at "
        "every call. Hold the pool's bits as unsigned integers of the same width and bitcast after "
        "reading."
    )
    return True
