# SPDX-License-Identifier: Apache-2.0
"""A network that can be cut, delayed and reset: a TCP proxy between two processes under test.

A cut direction is not read any more: the sender's bytes stay unacknowledged by the application at
the other end, and its FIN and RST are not passed on, just as when packets are lost. Connections
that are made meanwhile stand (the kernel answers for us) but carry nothing. When the network heals,
everything goes on, which is what retransmission does.
"""

import asyncio
import concurrent.futures
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, TypeVar

# Up: from the one who connects to the one who listens.
Direction = Literal["up", "down"]
BOTH: tuple[Direction, ...] = ("up", "down")

_BLOCK_BYTES = 1 << 18
_QUEUED_BLOCKS = 64
_LINGER_0 = struct.pack("ii", 1, 0)

T = TypeVar("T")


class Gate:
    """One direction of all connections to one port."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay_seconds = 0.0
        self.credit: int | None = None
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """Waits until a block may pass, and counts it."""
        while not (self.open.is_set() and (self.credit is None or self.credit > 0)):
            self.open.clear()
            await self.open.wait()
        self.num_bytes += num_bytes
        if self.credit is not None:
            self.credit -= num_bytes


class _Connection:
    """Two sockets and what flows between them."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.ends = (near, far)
        self.pumps: list[asyncio.Task[None]] = []
        self.reset = False

    def end(self, *, reset: bool) -> None:
        """Has the connection closed. Not here: a socket must not be closed while it is awaited."""
        self.reset = self.reset or reset
        for pump in self.pumps:
            pump.cancel()

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                if self.reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            end.close()


class _Port:
    """A port that stands for another one."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.gates: dict[Direction, Gate] = {"up": Gate(), "down": Gate()}
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.serving: asyncio.Task[None] | None = None
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.listener.setblocking(False)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self.listener)
            task = asyncio.create_task(self._connect(_Connection(near, socket.socket())))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _connect(self, connection: _Connection) -> None:
        near, far = connection.ends
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self.gates["up"].take(0)
            await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", self.target))
            pumps = [self._pump(near, far, "up"), self._pump(far, near, "down")]
            connection.pumps = [asyncio.create_task(pump) for pump in pumps]
            self.connections.add(connection)
            ended, _ = await asyncio.wait(connection.pumps, return_when=asyncio.FIRST_EXCEPTION)
            broken = any(not each.cancelled() and each.exception() for each in ended)
            connection.end(reset=broken)
            await asyncio.wait(connection.pumps)
        except OSError:
            connection.reset = True  # Nobody listens there.
        finally:
            self.connections.discard(connection)
            connection.close()

    async def _pump(
        self, source: socket.socket, target: socket.socket, direction: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        gate = self.gates[direction]
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_BLOCKS)
        writer = asyncio.create_task(_write(target, queue))
        try:
            block = b"any"
            while block and not writer.done():
                await gate.take(0)
                try:
                    block = await loop.sock_recv(source, _BLOCK_BYTES)
                except OSError:
                    await gate.take(0)  # Nor does a reset get through.
                    raise
                await gate.take(len(block))
                await queue.put((time.monotonic() + gate.delay_seconds, block))
            await writer
        finally:
            writer.cancel()
            await asyncio.wait([writer])


async def _write(target: socket.socket, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, block = await queue.get()
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if not block:
            target.shutdown(socket.SHUT_WR)
            return
        await asyncio.get_running_loop().sock_sendall(target, block)


class Proxy:
    """Ports that stand for others, run by a thread of their own. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ports: dict[str, _Port] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def forward(self, name: str, target: int) -> int:
        """Opens a port that stands for `target`.

        Args:
            name: What the port is called below.
            target: A port of the loopback address; nobody need listen there yet.

        Returns:
            The port.
        """

        async def start() -> _Port:
            port = _Port(target)
            port.serving = asyncio.create_task(port.serve())
            return port

        port = self._ports[name] = self._run(start())
        return int(port.listener.getsockname()[1])

    def cut(self, names: Iterable[str], directions: Iterable[Direction] = BOTH) -> None:
        """Loses whatever is sent from now on."""
        for gate in self._gates(names, directions):
            self._call(gate.open.clear)
            self._set(gate, "credit", 0)

    def delay(self, names: Iterable[str], seconds: float) -> None:
        """Has everything arrive later."""
        for gate in self._gates(names, BOTH):
            self._set(gate, "delay_seconds", seconds)

    def hold_after(self, name: str, num_bytes: int) -> None:
        """Stops what flows down after so many bytes."""
        for gate in self._gates([name], ("down",)):
            self._set(gate, "num_bytes", 0)
            self._set(gate, "credit", num_bytes)

    def is_held(self, name: str) -> bool:
        """Whether `hold_after` has taken effect."""
        (gate,) = self._gates([name], ("down",))
        return gate.credit is not None and gate.credit <= 0 and gate.num_bytes > 0

    def release(self, name: str) -> None:
        """Undoes `hold_after`."""
        for gate in self._gates([name], ("down",)):
            self._set(gate, "credit", None)
            self._call(gate.open.set)

    def reset(self, names: Iterable[str]) -> None:
        """Answers all connections that stand with RST, at both ends. New ones are welcome."""

        def kill() -> None:
            for name in names:
                for connection in self._ports[name].connections:
                    connection.end(reset=True)

        self._call(kill)

    def heal(self) -> None:
        """Lets everything through again."""

        def repair() -> None:
            for port in self._ports.values():
                for gate in port.gates.values():
                    gate.credit, gate.delay_seconds = None, 0.0
                    gate.open.set()

        self._call(repair)

    def close(self) -> None:
        """Ends the thread and every connection."""

        async def stop() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for port in self._ports.values():
                for connection in port.connections:
                    connection.end(reset=False)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for port in self._ports.values():
                port.listener.close()

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _gates(self, names: Iterable[str], directions: Iterable[Direction]) -> list[Gate]:
        return [self._ports[name].gates[way] for name in names for way in directions]

    def _set(self, gate: Gate, name: str, value: float | None) -> None:
        self._call(lambda: setattr(gate, name, value))

    def _call(self, action: Callable[[], None]) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            action()
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result(5.0)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(5.0)
