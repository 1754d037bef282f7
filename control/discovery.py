# SPDX-License-Identifier: Apache-2.0
"""How a decode server finds the prefill server that holds a room.

One connection per bootstrap server, kept while it lives. Each room is looked up: the answer depends
on the room when several prefill servers register in one place. Nothing is remembered beyond the
connection, so a bootstrap server that has moved or restarted cannot be asked by mistake.

Everything runs on the control loop's thread, but for resolving names.
"""

import dataclasses
import itertools
from collections.abc import Callable

from kvferry.control.control_loop import ControlLoop
from kvferry.control.messages import Instance, Lookup, LookupReply, Message, Refused
from kvferry.control.security import check_advertise, host_port, resolve
from kvferry.control.side_channel import ChannelOptions, ClientChannel
from kvferry.control.tally import Tally
from kvferry.control.workers import WorkerPool

OnFound = Callable[[Instance], None]
OnMissing = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Query:
    room: int
    on_found: OnFound
    on_missing: OnMissing


class _Server:
    """One bootstrap server, from the first look-up until its connection ends."""

    def __init__(self, owner: "Discovery", host: str, port: int) -> None:
        self.owner = owner
        self.host = host
        self.port = port
        self.waiting: list[_Query] = []  # Until the connection stands.
        self.asked: dict[int, _Query] = {}
        self.numbers = itertools.count(1)
        self.channel = ClientChannel(
            owner.loop, owner.tally, owner.options, self.flush, self.take, self.end
        )

    def ask(self, query: _Query) -> None:
        if not self.channel.up:
            self.waiting.append(query)
            return
        number = next(self.numbers)
        self.asked[number] = query
        self.channel.send(Lookup(query=number, room=query.room))

    def flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        for query in waiting:
            self.ask(query)

    def take(self, message: Message) -> None:
        match message:
            case LookupReply(query=number, instance=instance, reason=reason):
                query = self.asked.pop(number, None)
                if query is None:
                    self.owner.tally.add("ignored_unknown_query")
                elif instance is None:
                    query.on_missing(reason or "the bootstrap server gave no reason")
                else:
                    self.owner.deliver(query, instance)
            case Refused(reason=reason):
                self.end(f"refused: {reason}")
            case _:
                self.owner.tally.add("ignored_unexpected")

    def end(self, reason: str) -> None:
        self.owner.forget(self)
        self.channel.close()
        queries = [*self.waiting, *self.asked.values()]
        self.waiting.clear()
        self.asked.clear()
        where = host_port(self.host, self.port)
        for query in queries:
            query.on_missing(f"bootstrap server {where} cannot be asked: {reason}")


class Discovery:
    """Look-ups of rooms at bootstrap servers.

    Args:
        loop: The control loop.
        tally: Gets the totals of ignored messages.
        options: Timeouts and keys.
        resolver: Threads for resolving host names.
    """

    def __init__(
        self, loop: ControlLoop, tally: Tally, options: ChannelOptions, resolver: WorkerPool
    ) -> None:
        self.loop = loop
        self.tally = tally
        self.options = options
        self._resolver = resolver
        self._servers: dict[tuple[str, int], _Server] = {}

    def find(
        self, host: str, port: int, room: int, on_found: OnFound, on_missing: OnMissing
    ) -> None:
        """Looks up a room.

        Args:
            host: Name or address of the bootstrap server.
            port: Its port.
            room: The room.
            on_found: Called with the prefill instance.
            on_missing: Called with the reason if there is none. Exactly one of the two is called,
                within the lifetime of the connection.
        """
        query = _Query(room, on_found, on_missing)
        server = self._servers.get((host, port))
        if server is not None:
            server.ask(query)
            return
        server = _Server(self, host, port)
        server.waiting.append(query)
        self._servers[host, port] = server
        self._connect(server)

    def forget(self, server: _Server) -> None:
        """Drops a server whose connection has ended, unless it was replaced already."""
        if self._servers.get((server.host, server.port)) is server:
            del self._servers[server.host, server.port]

    def deliver(self, query: _Query, instance: Instance) -> None:
        """Passes a look-up's result on, if a peer can be reached by it."""
        try:
            check_advertise(instance.host)
        except ValueError as error:
            query.on_missing(f"the prefill server's registration is unusable: {error}")
            return
        query.on_found(instance)

    def close(self) -> None:
        """Disconnects; what is being looked up ends as missing."""
        for server in list(self._servers.values()):
            server.end("this server is shutting down")

    def _connect(self, server: _Server) -> None:
        def job() -> None:
            try:
                address = resolve(server.host)
            except OSError as error:
                reason = f"host name {server.host!r} cannot be resolved: {error}"
                self.loop.post(lambda: server.end(reason))
                return
            self.loop.post(lambda: server.channel.open(address, server.port))

        def on_error(error: Exception) -> None:
            self.loop.post(lambda: server.end(f"resolving {server.host!r} failed: {error!r}"))

        if not self._resolver.submit(job, on_error):
            server.end("too many host names are being resolved")
