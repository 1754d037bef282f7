# SPDX-License-Identifier: Apache-2.0
"""How a decode server finds the prefill server that holds a room.

One connection per bootstrap server, kept while it lives. Each room is looked up: the answer depends
on the room when several prefill servers register in one place. Nothing is remembered beyond the
connection, so a bootstrap server that has moved or restarted cannot be asked by mistake.

Everything runs on the control loop's thread, but for resolving names. Numeric addresses need none
of that, and never wait for a name. A name's addresses are tried in turn until one answers.
"""

import dataclasses
import itertools
from collections.abc import Callable

from kvferry.control.control_loop import ControlLoop
from kvferry.control.messages import Instance, Lookup, LookupReply, Message, Refused
from kvferry.control.names import Names
from kvferry.control.security import check_advertise, host_port, known_addresses
from kvferry.control.side_channel import ChannelOptions, ClientChannel
from kvferry.control.tally import Tally
from kvferry.control.workers import WorkerPool

# Requests name the servers, so their number has to be bounded. Each takes two ZMQ sockets.
_MAX_SERVERS = 128

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
        self.addresses: list[str] = []  # Not yet tried.
        self.waiting: list[_Query] = []  # Until the connection stands.
        self.asked: dict[int, _Query] = {}
        self.numbers = itertools.count(1)
        self.ended = False
        self.channel = self.new_channel()

    def new_channel(self) -> ClientChannel:
        owner = self.owner
        return ClientChannel(
            owner.loop, owner.tally, owner.options, self.flush, self.take, self.down
        )

    def connect(self, addresses: list[str]) -> None:
        if not self.ended:
            self.addresses = addresses
            self.channel.open(self.addresses.pop(0), self.port)

    def down(self, reason: str) -> None:
        if not self.addresses:
            self.end(reason)
            return
        self.channel = self.new_channel()
        self.channel.open(self.addresses.pop(0), self.port)

    def ask(self, query: _Query) -> None:
        if not self.channel.up:
            self.waiting.append(query)
            return
        number = next(self.numbers)
        self.asked[number] = query
        self.channel.send(Lookup(query=number, room=query.room))

    def flush(self) -> None:
        self.addresses.clear()  # This one answers.
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
        if self.ended:
            return
        self.ended = True
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
        self._names = Names(loop, resolver)
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
        known = known_addresses(host)
        host = known[0] if len(known) == 1 else host  # One form of it, so one connection.
        server = self._servers.get((host, port))
        if server is not None:
            server.ask(query)
            return
        if len(self._servers) >= _MAX_SERVERS and not self._drop_idle():
            on_missing(f"{_MAX_SERVERS} bootstrap servers are in use, which is the limit")
            return
        server = _Server(self, host, port)
        server.waiting.append(query)
        self._servers[host, port] = server
        self._names.look_up(host, server.connect, server.end)

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

    def _drop_idle(self) -> bool:
        for server in self._servers.values():
            if not server.waiting and not server.asked:
                server.end("not in use")
                return True
        return False
