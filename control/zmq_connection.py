# SPDX-License-Identifier: Apache-2.0
"""The ZMQ connection backend: the way in."""

from collections.abc import Callable
from typing import Literal

from kvferry.control.connection import KVManager, KVPages
from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.base import TransferEngine
from kvferry.control.kv_layout import KVLayout
from kvferry.control.zmq_decode import DecodeManager
from kvferry.control.zmq_manager import ControlOptions
from kvferry.control.zmq_prefill import PrefillManager

__all__ = ["ControlOptions", "create_manager"]


def create_manager(
    role: Literal["prefill", "decode"],
    *,
    options: ControlOptions,
    layout: KVLayout,
    pages: KVPages,
    engine: TransferEngine,
    on_event: Callable[[], None],
    loop: ControlLoop | None = None,
) -> KVManager:
    """Makes the manager of a process; nothing is opened before its `start`.

    Args:
        role: Which half this process serves.
        options: See `ControlOptions`.
        layout: What its KV cache looks like.
        pages: Its paged pool; see `KVPages`.
        engine: A transfer engine that is not started; the manager starts and closes it.
        on_event: Called without arguments, from any thread, after each change of a leg that the
            scheduler may be waiting for. Must not block.
        loop: The control loop that owns the process's ZMQ sockets; by default one is made, and
            ended with the manager.

    Returns:
        The manager.

    Raises:
        ValueError: If the role is another one.
    """
    if role not in ("prefill", "decode"):
        raise ValueError(f"role must be 'prefill' or 'decode', got {role!r}")
    manager = PrefillManager if role == "prefill" else DecodeManager
    return manager(options, layout, pages, engine, on_event=on_event, loop=loop)
