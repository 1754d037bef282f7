# SPDX-License-Identifier: Apache-2.0
"""The other half of a real server's requests, held in the test's hand.

A prefill or decode server cannot tell it from a real one, but it does only what the test says: so a
hand-over can be stopped in any state.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import zmq

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.connection import KVManager, KVReceiver, KVSender
from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.registry import create_engine
from kvferry.control.kv_layout import KVLayout
from kvferry.control.messages import Instance, Lookup, LookupReply
from kvferry.control.prompt_digest import PROMPT_DIGEST, prompt_digest
from kvferry.control.wire import decode, encode
from kvferry.control.zmq_connection import ControlOptions, create_manager
from kvferry.demo.stack import Server

_ROOMS = itertools.count(7001)


def instance_of(server: Server) -> Instance:
    """Asks a prefill server's bootstrap server about it.

    Args:
        server: A prefill server.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.connect(f"tcp://127.0.0.1:{server.bootstrap_port}")
        dealer.send(encode(Lookup(query=1, room=1)))
        reply = decode(dealer.recv())
    assert isinstance(reply, LookupReply) and reply.instance is not None, reply
    return reply.instance


class _Pages:
    """Pages of a layout that hold nothing."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
        return [jnp.zeros(spec.shape, spec.dtype) for spec in self.specs(len(page_ids))]

    def scatter(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        assert all(len(array) >= len(page_ids) for array in arrays)

    def specs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        rows = next(size for size in self._layout.page_buckets if size >= num_pages)
        shape = (rows, *self._layout.page_shape)
        spec = jax.ShapeDtypeStruct(shape, jnp.dtype(self._layout.storage_dtype))
        return [spec] * self._layout.num_layers


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """A manager that plays one half.

    Attributes:
        manager: The manager.
        bootstrap_port: Where requests are told to meet.
        page_size: Tokens per page.
    """

    manager: KVManager
    bootstrap_port: int
    page_size: int

    def meeting(self) -> dict[str, str | int]:
        """Returns the fields that a router would add, with a new room."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(_ROOMS),
        }

    def sender(self, body: dict[str, object]) -> KVSender:
        """Opens the prefill leg of a request."""
        return self.manager.open_sender(_room(body))

    def receiver(self, body: dict[str, object]) -> KVReceiver:
        """Opens the decode leg of a request."""
        return self.manager.open_receiver("127.0.0.1", self.bootstrap_port, _room(body))

    def ask(self, receiver: KVReceiver, prompt: Sequence[int]) -> None:
        """Asks for the pages of a prompt."""
        receiver.request(
            list(range(-(-len(prompt) // self.page_size))),
            prompt_tokens=len(prompt),
            extra={PROMPT_DIGEST: prompt_digest(prompt)},
        )


def _room(body: dict[str, object]) -> int:
    room = body["bootstrap_room"]
    assert isinstance(room, int)
    return room


@contextlib.contextmanager
def counterpart(role: Literal["prefill", "decode"], server: Server) -> Iterator[Counterpart]:
    """Runs the other half.

    Args:
        role: Which half to play.
        server: A prefill server of the model; its layout and engine are taken over. It is the peer
            if the role is decode; else any decode server may be, that is told the meeting.
    """
    theirs = instance_of(server)
    with contextlib.ExitStack() as stack:
        port = server.bootstrap_port
        if role == "prefill":
            bootstrap = ZmqBootstrapServer("127.0.0.1", 0)
            bootstrap.start()
            stack.callback(bootstrap.stop)
            port = bootstrap.port
        manager = create_manager(
            role,
            options=ControlOptions(bootstrap_port=port if role == "prefill" else 0),
            layout=theirs.layout,
            pages=_Pages(theirs.layout),
            engine=create_engine(theirs.engine.name, EngineOptions()),
            on_event=lambda: None,
        )
        manager.start()
        stack.callback(manager.stop)
        yield Counterpart(manager, port, theirs.layout.page_size)
