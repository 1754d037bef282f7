# SPDX-License-Identifier: Apache-2.0
"""Loads a bootstrap server: look-up times and the cost per room, with few rooms and with many.

The server is `bootstrap_main` in a process of its own; this process plays its clients over real
sockets: prefill servers that keep their leases, announce rooms and retract them, and decode servers
that look rooms up at a fixed rate, whatever the answers take. A look-up's time counts from the
moment at which it was due, so a server that stalls is not asked less.

    python -m kvferry.bench.bootstrap_bench
"""

import dataclasses
import gc
import heapq
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import psutil
import zmq
from absl import app, flags

from kvferry.control.ids import new_generation, new_instance_id
from kvferry.control.kv_layout import KVLayout
from kvferry.control.messages import (
    Announce,
    EngineInfo,
    Heartbeat,
    HeartbeatAck,
    Instance,
    Lookup,
    LookupReply,
    Message,
    Register,
    Registered,
    Retract,
)
from kvferry.control.wire import decode, encode
from kvferry.demo.ports import LOOPBACK, PortPicker
from kvferry.demo.processes import Processes

_INSTANCES = flags.DEFINE_integer("instances", 200, "Registered prefill servers.", lower_bound=2)
_RATE = flags.DEFINE_integer("lookups_per_second", 1000, "Look-ups per second.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 6.0, "Length of each run.", lower_bound=1.0)

ROOMS = (100, 1_000, 10_000)
LIMIT_MS = 5.0
_REPEATS = 3
_BATCH_ROOMS = 20_000
_LOOKERS = 8
_HEARTBEAT_SECONDS = 1.0
_WARM_UP_SECONDS = 1.0
_TIMEOUT_SECONDS = 20.0


def _instance(index: int) -> Instance:
    layout = KVLayout(
        num_layers=30,
        page_size=64,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        storage_dtype="bfloat16",
        page_shape=(64, 16, 128),
        page_buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
        model_fingerprint="0" * 64,
        max_context=8192,
    )
    return Instance(
        instance_id=new_instance_id(),
        generation=new_generation(),
        role="prefill",
        host=LOOPBACK,
        side_channel_port=1 + index,
        layout=layout,
        engine=EngineInfo(name="jax", address=f"{LOOPBACK}:{1 + index}"),
    )


class Client:
    """A connection to the server.

    Attributes:
      socket: for polling.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://{LOOPBACK}:{port}")

    def send(self, message: Message) -> None:
        """Sends a message."""
        self.socket.send(encode(message))

    def wait_for(self, kind: type[Message]) -> None:
        """Reads until a message of some type comes.

        Raises:
          TimeoutError: none came in time.
        """
        while self.socket.poll(int(_TIMEOUT_SECONDS * 1000)):
            if isinstance(decode(self.socket.recv()), kind):
                return
        raise TimeoutError(f"no {kind.__name__} from the bootstrap server")


class Prefill(Client):
    """A registered prefill server.

    Attributes:
      instance: itself.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], port: int, instance: Instance
    ) -> None:
        super().__init__(context, port)
        self.instance = instance
        self._unanswered = 0
        self.send(Register(instance=instance))
        self.wait_for(Registered)

    def announce(self, room: int) -> None:
        """Says that it holds a room."""
        self.send(Announce(instance_id=self.instance.instance_id, rooms=[room]))

    def retract(self, room: int) -> None:
        """Says that it no longer holds a room."""
        self.send(Retract(instance_id=self.instance.instance_id, rooms=[room]))

    def beat(self) -> None:
        """Renews its lease."""
        while self._unanswered and self.socket.poll(0):
            self.wait_for(HeartbeatAck)
            self._unanswered -= 1
        instance = self.instance
        self.send(Heartbeat(instance_id=instance.instance_id, generation=instance.generation))
        self._unanswered += 1

    def settle(self) -> None:
        """Waits until the server has read everything that was sent."""
        while self._unanswered:
            self.wait_for(HeartbeatAck)
            self._unanswered -= 1


@dataclasses.dataclass(frozen=True)
class Row:
    """Results with some number of live rooms.

    Attributes:
      rooms: the number.
      room_us: the server's CPU time to announce one and retract one, in microseconds.
      p50_ms: median time of a look-up.
      p99_ms: time that 99 % of the look-ups do not exceed.
      max_ms: the longest.
      late_ms: time by which 99 % of the look-ups were not sent later than due; it is part of the
        other times, and tells how much of them is this machine's and not the server's.
      busy: share of one core that the server took meanwhile.
    """

    rooms: int
    room_us: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    late_ms: float
    busy: float


class Load:
    """All clients of one server.

    Args:
      port: the server's.
      server: its process, for its CPU time.
    """

    def __init__(self, port: int, server: psutil.Process) -> None:
        self._server = server
        self._context = zmq.Context()
        self._random = random.Random(0)
        self._prefills = [
            Prefill(self._context, port, _instance(index)) for index in range(_INSTANCES.value)
        ]
        self._lookers = [Client(self._context, port) for _ in range(_LOOKERS)]
        self._rooms: list[tuple[int, Prefill]] = []

    def close(self) -> None:
        """Ends all connections."""
        self._context.destroy(linger=0)

    def grow(self, count: int) -> None:
        """Announces rooms until there are `count`."""
        while len(self._rooms) < count:
            self._rooms.append(self._announce())
        self._settle()

    def room_seconds(self) -> float:
        """Replaces rooms by new ones as fast as the server takes it.

        Returns:
          CPU seconds of the server per room: announced once and retracted once.
        """
        self._settle()
        before = self._cpu_seconds()
        for _ in range(_BATCH_ROOMS):
            self._replace()
        self._settle()
        return (self._cpu_seconds() - before) / _BATCH_ROOMS

    def look_up(self, seconds: float) -> tuple[list[float], list[float], float]:
        """Looks random rooms up at the fixed rate; with each, one more begins and one ends.

        Args:
          seconds: for how long.

        Returns:
          Seconds of each look-up from when it was due, sorted; seconds by which each was sent too
          late, sorted; the server's share of one core.

        Raises:
          RuntimeError: an answer names another instance than the one that has the room.
          TimeoutError: an answer does not come.
        """
        total = int(_RATE.value * seconds)
        poller = zmq.Poller()
        for looker in self._lookers:
            poller.register(looker.socket, zmq.POLLIN)
        cpu, begin = self._cpu_seconds(), time.perf_counter()
        waiting: dict[int, tuple[float, str]] = {}
        taken: list[float] = []
        late: list[float] = []
        beats = [(begin + self._random.random(), n) for n in range(len(self._prefills))]
        heapq.heapify(beats)
        sent, passing = 0, self._announce()
        while len(taken) < total:
            now = time.perf_counter()
            while sent < total and begin + sent / _RATE.value <= now:
                room, holder = self._random.choice(self._rooms)
                waiting[sent] = (begin + sent / _RATE.value, holder.instance.instance_id)
                late.append(time.perf_counter() - waiting[sent][0])
                self._lookers[sent % _LOOKERS].send(Lookup(query=sent, room=room))
                # Never one that is looked up: its end could overtake the look-up.
                passing, previous = self._announce(), passing
                previous[1].retract(previous[0])
                sent += 1
            while beats[0][0] <= now:
                due, index = heapq.heappop(beats)
                self._prefills[index].beat()
                heapq.heappush(beats, (due + _HEARTBEAT_SECONDS, index))
            for ready, _ in poller.poll(1 if sent < total else 50):
                taken += self._take(ready, waiting)
            if now > begin + seconds + _TIMEOUT_SECONDS:
                raise TimeoutError(f"{len(waiting)} look-ups are not answered")
        passing[1].retract(passing[0])
        share = (self._cpu_seconds() - cpu) / (time.perf_counter() - begin)
        return sorted(taken), sorted(late), share

    def _take(self, ready: zmq.Socket[bytes], waiting: dict[int, tuple[float, str]]) -> list[float]:
        taken = []
        while ready.poll(0):
            reply = decode(ready.recv())
            assert isinstance(reply, LookupReply), reply
            due, holder = waiting.pop(reply.query)
            taken.append(time.perf_counter() - due)
            found = reply.instance.instance_id if reply.instance is not None else reply.reason
            if found != holder:
                raise RuntimeError(f"look-up {reply.query}: {found}, wanted {holder}")
        return taken

    def _announce(self) -> tuple[int, Prefill]:
        room, holder = self._random.getrandbits(63), self._random.choice(self._prefills)
        holder.announce(room)
        return room, holder

    def _replace(self) -> None:
        place = self._random.randrange(len(self._rooms))
        room, holder = self._rooms[place]
        holder.retract(room)
        self._rooms[place] = self._announce()

    def _settle(self) -> None:
        """Waits until the server has read what all prefill servers have sent; renews leases."""
        for prefill in self._prefills:
            prefill.beat()
        for prefill in self._prefills:
            prefill.settle()

    def _cpu_seconds(self) -> float:
        times = self._server.cpu_times()
        return float(times.user + times.system)


def _p99(ordered: Sequence[float]) -> float:
    return ordered[int(0.99 * len(ordered))]


def measure(load: Load, rooms: int) -> Row:
    """Measures with some number of live rooms.

    Args:
      load: the clients; the number of rooms may only grow.
      rooms: the number.

    Returns:
      The results.
    """
    load.grow(rooms)
    room_seconds = statistics.median(load.room_seconds() for _ in range(_REPEATS))
    load.look_up(_WARM_UP_SECONDS)
    taken, late, busy = load.look_up(_SECONDS.value)
    return Row(
        rooms=rooms,
        room_us=1e6 * room_seconds,
        p50_ms=1e3 * statistics.median(taken),
        p99_ms=1e3 * _p99(taken),
        max_ms=1e3 * taken[-1],
        late_ms=1e3 * _p99(late),
        busy=busy,
    )


def _print_table(rows: Sequence[Row], say: Callable[[str], None]) -> None:
    say(f"\none bootstrap server, {_INSTANCES.value} instances, {_RATE.value} look-ups per second")
    say(
        "  live rooms   announce + retract   look-up p50      p99      max   sent late p99"
        "   server busy"
    )
    for row in rows:
        say(
            f"  {row.rooms:10,}   {row.room_us:12.1f} us CPU   {row.p50_ms:8.2f} ms"
            f" {row.p99_ms:5.2f} ms {row.max_ms:5.2f} ms   {row.late_ms:10.2f} ms"
            f"   {100 * row.busy:9.0f} %"
        )
    growth = rows[-1].room_us / rows[0].room_us
    worst = max(row.p99_ms for row in rows)
    say(f"  cost per room, {rows[-1].rooms:,} rooms against {rows[0].rooms:,}: {growth:.2f}x")
    say(f"  worst p99 {worst:.2f} ms, the limit is {LIMIT_MS:g} ms: {_verdict(worst)}")


def _verdict(worst_ms: float) -> str:
    return "kept" if worst_ms < LIMIT_MS else "NOT KEPT"


def main(argv: Sequence[str]) -> None:
    """Starts the server, loads it, and ends it.

    Args:
      argv: the command line without its flags.
    """
    del argv
    port = PortPicker().pick()
    command = [sys.executable, "-m", "kvferry.control.bootstrap_main", f"--bootstrap_port={port}"]
    with Processes() as processes:
        child = processes.start("bootstrap", command, lambda: True)
        load = Load(port, psutil.Process(child.pid))
        gc.freeze()  # A pause of this process would count as the server's.
        try:
            rows = [measure(load, rooms) for rooms in ROOMS]
        finally:
            load.close()
    _print_table(rows, print)


if __name__ == "__main__":
    app.run(main)
