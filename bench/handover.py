# SPDX-License-Identifier: Apache-2.0
"""One hand-over after the other through the real control layer, with nothing to compute.

A prefill server's half is in this process or that; each hands one page over as soon as the two have
met. What is left is the cost of the connection: meeting, notice, pull, acknowledgement.
"""

import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.connection import KVManager
from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.registry import create_engine
from kvferry.control.kv_layout import KVLayout
from kvferry.control.kv_poll import KVPoll
from kvferry.control.messages import KVMetadata
from kvferry.control.zmq_connection import ControlOptions, create_manager

_LOOPBACK = "127.0.0.1"
_LAYERS = 30
_PAGE_SHAPE = (16, 6, 64)
_PAGES = 8
_SECONDS = 10.0
_LAYOUT = KVLayout(
    num_layers=_LAYERS,
    page_size=_PAGE_SHAPE[0],
    num_kv_heads=3,
    head_dim=64,
    dtype="bfloat16",
    storage_dtype="uint16",
    page_shape=_PAGE_SHAPE,
    page_buckets=(1, 8),
    model_fingerprint="benchmark",
    max_context=128,
)


class HandoverError(RuntimeError):
    """A hand-over failed or took too long."""


class _Pool:
    """Pages in host memory; the layout is that of the demo's model."""

    def __init__(self) -> None:
        shape = (_PAGES, *_PAGE_SHAPE)
        self.layers = [np.full(shape, layer, np.uint16) for layer in range(_LAYERS)]

    def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
        return list(jax.device_put([layer[list(page_ids)] for layer in self.layers]))

    def scatter(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        for layer, array in zip(self.layers, arrays, strict=True):
            layer[list(page_ids)] = np.asarray(array)[: len(page_ids)]

    def specs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((num_pages, *_PAGE_SHAPE), np.uint16)] * _LAYERS


class _Side:
    """A manager, and a way to wait for its legs."""

    def __init__(self, role: str, engine: str, bootstrap_port: int) -> None:
        self._changed = threading.Condition()
        self.manager: KVManager = create_manager(
            "prefill" if role == "prefill" else "decode",
            options=ControlOptions(bootstrap_port=bootstrap_port),
            layout=_LAYOUT,
            pages=_Pool(),
            engine=create_engine(engine, EngineOptions()),
            on_event=self._on_event,
        )
        self.manager.start()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, _SECONDS):
                raise HandoverError(f"not within {_SECONDS} s: {what}")

    def close(self) -> None:
        self.manager.stop()

    def _on_event(self) -> None:
        with self._changed:
            self._changed.notify_all()


class PrefillSide(_Side):
    """The prefill half, with a bootstrap server.

    Args:
        engine: Name of the transfer engine.
    """

    def __init__(self, engine: str) -> None:
        self.bootstrap = ZmqBootstrapServer(_LOOPBACK, 0)
        self.bootstrap.start()
        super().__init__("prefill", engine, self.bootstrap.port)

    def hand_over(self, room: int) -> None:
        """Hands one page over.

        Args:
            room: Where to meet.

        Raises:
            HandoverError: If that fails.
        """
        sender = self.manager.open_sender(room)

        def met() -> bool:
            return sender.poll() is KVPoll.WaitingForInput or sender.poll().terminal

        self.wait_for(met, f"the meeting in room {room}")
        sent = KVMetadata(first_token=1, prompt_tokens=_PAGE_SHAPE[0])
        if sender.failure is None and not sender.send([0], last=True, metadata=sent):
            raise HandoverError(f"room {room}: no room to publish one page")
        self.wait_for(lambda: sender.poll().terminal, f"the acknowledgement in room {room}")
        if sender.failure is not None:
            raise HandoverError(sender.failure.reason)

    def close(self) -> None:
        """Ends both."""
        super().close()
        self.bootstrap.stop()


class DecodeSide(_Side):
    """The decode half.

    Args:
        engine: Name of the transfer engine.
        bootstrap_port: Where the prefill half is found.
    """

    def __init__(self, engine: str, bootstrap_port: int) -> None:
        super().__init__("decode", engine, bootstrap_port)
        self._port = bootstrap_port

    def take_over(self, room: int) -> None:
        """Takes one page over.

        Args:
            room: Where to meet.

        Raises:
            HandoverError: If that fails.
        """
        receiver = self.manager.open_receiver(_LOOPBACK, self._port, room)
        receiver.request([1], prompt_tokens=_PAGE_SHAPE[0])

        def done() -> bool:
            receiver.commit()
            return receiver.poll().terminal

        self.wait_for(done, f"a page in room {room}")
        if receiver.failure is not None:
            raise HandoverError(receiver.failure.reason)
