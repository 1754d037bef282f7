# SPDX-License-Identifier: Apache-2.0
"""Tells when nothing refers to a piece of memory any more.

JAX makes arrays of host memory without a copy, so memory may only be used again when no array,
numpy view or running computation refers to it. A weak reference to the memory itself does not tell:
JAX refers to whatever object the address came from. Hence the window, an object made for one use of
the memory, which only its users refer to.
"""

import weakref
from collections.abc import Callable

import numpy as np

from kvferry.control.engines.frames import Bytes


class _Window:
    """What arrays over memory are made from, and refer to as long as they live."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: Bytes, num_bytes: int) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (memory.ctypes.data, not memory.flags.writeable),
        }


def open_window(memory: Bytes, num_bytes: int, on_free: Callable[[], object]) -> Bytes:
    """Opens the beginning of a piece of memory for one use.

    Args:
        memory: 1-D, uint8, contiguous; kept as long as the window is used.
        num_bytes: How much of it.
        on_free: Called once when nothing refers to the window any more, but not at the end of the
            process. On any thread, in the middle of anything: it must not take a lock.

    Returns:
        The bytes, 1-D, uint8, writable if the memory is.
    """
    window = _Window(memory, num_bytes)
    weakref.finalize(window, on_free).atexit = False
    return np.asarray(window)
