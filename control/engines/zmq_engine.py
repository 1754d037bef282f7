# SPDX-License-Identifier: Apache-2.0
"""A transfer engine on ZMQ, for its simplicity: the only one whose pages can travel under CURVE.

The pulling side asks for pieces of a publication, a few ahead of what it has, and puts them into
one block of host memory that becomes the arrays. So what is under way is bounded, whoever stops to
read harms only himself, and whoever gives up simply asks no more. The id is the capability: it is
in every request, and without keys the sockets stay on loopback.

One thread owns all sockets.
"""

import functools
from collections.abc import Sequence

import jax
import zmq

from kvferry.control.engines.base import EngineOptions, EngineStartError, Spec
from kvferry.control.engines.frames import Bytes
from kvferry.control.engines.host_arrays import as_bytes, total_bytes
from kvferry.control.engines.loop_engine import LoopEngine
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.engines.tcp_buffers import BufferPool
from kvferry.control.engines.zmq_peers import ZmqPull, ZmqSource, ZmqTarget
from kvferry.control.security import PortInUseError, check_advertise, check_bind, host_port


@transfer_engine("zmq")
class ZmqEngine(LoopEngine[list[Bytes], ZmqPull]):
    """Moves arrays over ZMQ.

    Args:
        options: `host` must be numeric and not a wildcard, and loopback if there are no `keys`.
    """

    exposure = ""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._source = ZmqSource(self._loop, self._publications, options.keys)
        self._buffers = BufferPool()

    def start(self) -> str:
        """Listens.

        Returns:
            The address, "ip:port".

        Raises:
            PortInUseError: If the port is taken.
            EngineStartError: If the address is a wildcard, not numeric, not of this machine, or
                not loopback and there are no keys.
        """
        host, port = self.options.host, self.options.port
        try:
            check_advertise(host)
            check_bind(host, self.options.keys)
            self._loop.start()
            port = self._loop.call(functools.partial(self._source.open, host, port))
        except (OSError, ValueError, zmq.ZMQError) as error:
            self._loop.stop()
            if isinstance(error, PortInUseError):
                raise
            raise EngineStartError(f"transfer engine 'zmq' cannot start: {error}") from error
        self._run()
        return host_port(host, port)

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Keeps the arrays until they are pulled and released; see `TransferEngine.publish`."""
        self._check_publish(key, arrays)
        self._add(
            key,
            arrays,
            deadline_seconds,
            lambda held: [as_bytes(each) for each in jax.device_get(held)],
            lambda: self._source.forget(key),
        )

    def close(self) -> None:
        """See `LoopEngine.close`."""
        super().close()
        self._buffers.close()

    def _new_pull(self, source: tuple[str, int], specs: Sequence[Spec], seconds: float) -> ZmqPull:
        memory = self._buffers.lend(total_bytes(specs))
        return ZmqPull(source, specs, seconds, self._forget, memory)

    def _connect(self, address: str) -> ZmqTarget:
        return ZmqTarget(self._loop, address, self.options.keys, self._on_down)
