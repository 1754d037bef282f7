# SPDX-License-Identifier: Apache-2.0
"""The transfer engine on `jax.experimental.transfer`, with its many ways to fail shut off.

What that library does when it is used a little wrong, found by experiment, and what is done here:

* Without transport addresses, or with more of them on the publishing side than on the pulling one,
  a process aborts; with another transfer size on each side later pulls return other bytes. So both
  ends use `EngineOptions.channels` and `chunk_bytes`, and `settings()` has them compared.
* Host names that do not resolve become a wildcard: only numeric addresses are taken.
* Two servers start on one port without an error: the port is probed and claimed first.
* Only byte counts are checked on arrival, so a spec of another shape, dtype or sharding gives wrong
  data in silence, and a smaller one leaks a receive buffer for good. The layer above builds specs
  from what was published and compares them; non-default memory layouts are refused here.
* A second publication under an id drops the first: refused. Deleted arrays crash: refused.
* A publication lives until it is pulled, whatever Python refers to: `release` replaces it by an
  error array, which frees it and gives a late pull an error. Deadlines are only looked at when
  something happens, so a tick thread makes something happen while there is anything to expire.
* A pull of something that is not there, from a dead port, or with zero-size arrays never ends:
  own deadlines, and zero-size arrays do not travel.
* `is_ready` is true for arrays that carry an error: they are looked at once more when ready.
* A connection that had an error stays broken: it is dropped, and the next pull makes a new one.
* `connect` never fails: a connection of our own shows first whether anything listens.
* Cancelling a pull while bytes are in flight leaks receive buffers until the process is wedged: a
  pull that is given up is left to drain, unless nothing can be in flight (jax_pull.py), and
  whether the process can still receive is tried out (jax_watch.py).
* A thread that waits in an array when the interpreter ends aborts the process: `close`, which runs
  at the end of the program too, ends all pulls first.
* With fewer staging copies than twice the transports, a publisher is wedged for good after a few
  pullers have died in mid-transfer (one to ten; with twice as many not after thirty): refused.
* Donation of what is published shows at the other end as other bytes with raw buffers: not used.
* `_pull_into_flat` aborts, crashes or loses writes when used a little wrong: not used.
* Four zero bytes to the control port abort the process, and a puller that stops to read blocks all
  others. Neither can be helped from here: only peers may reach the ports; or use engine `tcp`.

tests/control/raw_jax_transfer_test.py shows each of these on the library and on the engine.
"""

import atexit
import datetime
import functools
import importlib.metadata
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
    sharding_of,
)
from kvferry.control.engines.jax_pull import Connection, JaxPull
from kvferry.control.engines.jax_watch import ReceiveWatch
from kvferry.control.engines.ports import claim_port
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.engines.spare_threads import SpareThreads
from kvferry.control.security import (
    PortInUseError,
    check_advertise,
    host_port,
)
from kvferry.control.thread_boundary import GuardedThread

# No id of ours has more than 53 bits.
_TICK_KEY = 2**64 - 1
_PROBE_KEYS = range(2**63, 2**64 - 1)
_TICK_SECONDS = 0.2
_LINGER_SECONDS = 30.0
_DEADLINE_MARGIN_SECONDS = 1.0
_REACH_SECONDS = 2.0
_CLOSE_SECONDS = 2.0
_MAX_KINDS = 256
COPIES_PER_CHANNEL = 2
_TICK_SPEC = jax.ShapeDtypeStruct((1,), np.uint8)


def _clock_time(seconds_from_now: float) -> datetime.datetime:
    now = datetime.datetime.now(datetime.UTC)
    return now + datetime.timedelta(seconds=seconds_from_now)


def _placed(spec: Spec) -> Spec:
    if spec.sharding is not None:
        return spec
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding_of(spec))


@transfer_engine("jax")
class JaxEngine(TransferEngine):
    """Moves arrays with `jax.experimental.transfer`.

    Args:
        options: `host` must be numeric and not a wildcard; `channels`, `chunk_bytes` and
            `parallel_copies` are the library's transports, transfer size and copy limit.
    """

    exposure = (
        "jax.experimental.transfer can neither authenticate nor encrypt: KV pages, and with them"
        " the prompts, travel in the clear, and whoever reaches the ports can end this process."
    )

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._server: Any = None
        self._address = ""
        self._claim = claim_port(options.host, 0)
        self._lock = threading.Condition()
        self._published: dict[int, int] = {}
        self._linger_until = 0.0
        self._connections: dict[str, Connection] = {}
        self._all_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._good_kinds: set[tuple[Any, jax.sharding.Sharding]] = set()
        self._spare_threads = SpareThreads("kv-jax-wait")
        self._watch = ReceiveWatch(self._pull_from_self, self._wake)
        self._probe_keys = iter(_PROBE_KEYS)
        self._tick_thread = GuardedThread(self._tick, "kv-jax-tick")
        self._parked = False
        self._closed = False

    @property
    def failure(self) -> str | None:
        """Set when no pull can end well any more, see `ReceiveWatch`, or nothing expires."""
        return self._tick_thread.failure or self._watch.failure

    def start(self) -> str:
        """Opens the transfer server.

        Returns:
            Its address, "ip:port".

        Raises:
            PortInUseError: If the port is taken.
            EngineStartError: If the address is a wildcard or not numeric, there are too few
                parallel copies, or the library refuses.
        """
        host, port = self.options.host, self.options.port
        copies, least = self.options.parallel_copies, COPIES_PER_CHANNEL * self.options.channels
        if copies < least:
            raise EngineStartError(
                f"transfer engine 'jax' needs at least {least} parallel copies for"
                f" {self.options.channels} channels, got {copies}: with fewer, pullers that die in"
                " the middle of a transfer end all transfers of this process; use more copies or"
                " fewer channels"
            )
        try:
            check_advertise(host)
            self._claim = claim_port(host, port)
        except PortInUseError:
            raise
        except (OSError, ValueError) as error:
            raise EngineStartError(f"transfer engine 'jax' cannot start: {error}") from error
        client = jax.local_devices()[0].client
        try:
            self._server = transfer.start_transfer_server(
                client,
                host_port(host, port),
                [host_port(host, 0)] * self.options.channels,
                max_num_parallel_copies=self.options.parallel_copies,
                transfer_size=self.options.chunk_bytes,
                use_raw_buffers=False,
            )
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            self._claim.close()
            raise EngineStartError(
                f"transfer engine 'jax' cannot listen on {host_port(host, port)}: {error}"
            ) from error
        self._address = str(self._server.address())
        self._tick_array = jax.device_put(np.zeros(_TICK_SPEC.shape, _TICK_SPEC.dtype))
        self._gone_array = transfer.make_error_array(
            _placed(_TICK_SPEC), "released by the publisher"
        )
        self._tick_thread.start()
        atexit.register(self.close)
        return self._address

    def settings(self) -> Mapping[str, int | str]:
        """Returns the number of transports and the transfer size."""
        return {"channels": self.options.channels, "chunk_bytes": self.options.chunk_bytes}

    def versions(self) -> Mapping[str, str]:
        """Returns the versions of jax and jaxlib."""
        return {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Hands arrays to the transfer server.

        Args:
            key: One-shot id.
            arrays: What to publish.
            deadline_seconds: After this time the server drops them.

        Raises:
            ValueError: If `key` is published already or an array cannot travel.
            TransferError: If the engine is closed or the library refuses.
        """
        self._check_publishable(key, arrays)
        travelling = [array for array in arrays if array.size]
        timeout = _clock_time(deadline_seconds + _DEADLINE_MARGIN_SECONDS)
        # One lock over all of it: a release in between would be undone by the publication.
        with self._lock:
            if self._server is None or self._closed:
                raise TransferError(f"cannot publish {key}: transfer engine 'jax' is not running")
            if key in self._published:
                raise ValueError(f"key {key} is published already; ids are for one use")
            try:
                if travelling:
                    self._server.await_pull(key, travelling, timeout=timeout)
            except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
                raise TransferError(f"cannot publish {key}: {error}") from error
            self._published[key] = len(travelling)
            self._unpark()

    def release(self, key: int, *, delivered: bool) -> None:
        """Replaces a publication by error arrays, which frees it.

        Args:
            key: As published; unknown ids are ignored.
            delivered: If not, the error arrays stay for a while for a pull that is on its way.
        """
        with self._lock:
            count = self._published.pop(key, 0)
            if not count or self._server is None:
                return
            # Even what was delivered is replaced: the peer only says that it has pulled.
            linger = -_DEADLINE_MARGIN_SECONDS if delivered else _LINGER_SECONDS
            until = time.monotonic() + max(linger, 0.0) + 2 * _DEADLINE_MARGIN_SECONDS
            self._linger_until = max(self._linger_until, until)
            self._server.await_pull(key, [self._gone_array] * count, timeout=_clock_time(linger))
            self._unpark()

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts a pull.

        Args:
            address: The peer's address.
            key: What to pull.
            specs: What was published.
            deadline_seconds: Time from now after which it fails.

        Returns:
            The pull.

        Raises:
            TransferError: If the engine is not running, the address is malformed, or nothing
                listens there.
        """
        label = f"pull {key} from {address}"
        wanted, empty = [], {}
        for index, spec in enumerate(map(_placed, specs)):
            if 0 in spec.shape:
                # Not jnp.zeros: threads other than the step thread must not run programs.
                empty[index] = jax.device_put(np.zeros(spec.shape, spec.dtype), spec.sharding)
            else:
                wanted.append(spec)
        try:
            connection = self._connect(address, deadline_seconds)
            arrays = connection.pull(key, wanted) if wanted else []
        except (jax.errors.JaxRuntimeError, OSError, ValueError, TypeError) as error:
            self.disconnect(address)
            raise TransferError(f"{label}: {error}") from error
        return JaxPull(
            connection,
            self._spare_threads,
            self._watch,
            label,
            arrays,
            empty,
            deadline_seconds,
            functools.partial(self.disconnect, address),
        )

    def counters(self) -> dict[str, int]:
        """Returns published keys, pulls that drain, and open connections."""
        with self._lock:
            return {
                "published_keys": len(self._published),
                "draining_pulls": self._watch.num_draining,
                "connections": len(self._connections),
            }

    def close(self) -> None:
        """Releases everything. The library keeps its port until the process ends."""
        with self._lock:
            keys = list(self._published)
        for key in keys:
            self.release(key, delivered=False)
        with self._lock:
            self._closed = True
            self._connections.clear()
            self._lock.notify_all()
            connections = list(self._all_connections)
        # A thread that still waits in an array when the interpreter ends aborts the process.
        # Receive buffers need not be spared any more.
        for connection in connections:
            connection.poison()
        self._spare_threads.close(_CLOSE_SECONDS)
        if self._tick_thread.is_alive():
            self._tick_thread.join(_CLOSE_SECONDS)
        self._claim.close()
        atexit.unregister(self.close)

    def disconnect(self, address: str) -> None:
        """Forgets the connection to a peer, so that the next pull makes a new one."""
        with self._lock:
            self._connections.pop(address, None)

    def _check_publishable(self, key: int, arrays: Sequence[jax.Array]) -> None:
        for index, array in enumerate(arrays):
            if array.is_deleted():
                raise ValueError(f"cannot publish {key}: array {index} is deleted or donated")
        # To look closely takes 3 us for each array, and most are like those seen before.
        kinds = {_kind(array) for array in arrays}
        if kinds <= self._good_kinds:
            return
        for index, array in enumerate(arrays):
            if problem := _why_not(array):
                raise ValueError(f"cannot publish {key}: array {index} {problem}")
        self._good_kinds |= kinds
        if len(self._good_kinds) > _MAX_KINDS:
            self._good_kinds = kinds

    def _connect(self, address: str, seconds: float) -> Connection:
        with self._lock:
            if self._server is None or self._closed:
                raise TransferError("transfer engine 'jax' is not running")
            connection = self._connections.get(address)
        if connection is not None:
            return connection
        # The library's connect succeeds even if nothing is there, and its pulls then wait for ever.
        host, _, port = address.rpartition(":")
        where = (host.strip("[]"), int(port))
        socket.create_connection(where, min(seconds, _REACH_SECONDS)).close()
        with self._lock:
            if address not in self._connections:
                connection = Connection(self._server.connect(address))
                self._connections[address] = connection
                self._all_connections.add(connection)
            return self._connections[address]

    def _pull_from_self(self) -> jax.Array:
        key = next(self._probe_keys)
        self._server.await_pull(key, [self._tick_array], timeout=_clock_time(_LINGER_SECONDS))
        connection = self._server.connect(self._address)
        (array,) = connection.pull(key, [_placed(_TICK_SPEC)])
        return array

    def _tick(self) -> None:
        while True:
            with self._lock:
                self._parked = True
                while not (self._closed or self._expiring() or self._watch.active):
                    self._lock.wait()
                self._parked = False
                if self._closed:
                    return
                self._server.await_pull(_TICK_KEY, [self._tick_array], timeout=_clock_time(-1.0))
            self._watch.tick()
            with self._lock:
                self._lock.wait_for(lambda: self._closed, _TICK_SECONDS)

    def _wake(self) -> None:
        with self._lock:
            self._unpark()

    def _unpark(self) -> None:
        # Not while it ticks: a publication should not have to share the processor with it.
        if self._parked:
            self._lock.notify_all()

    def _expiring(self) -> bool:
        return bool(self._published) or time.monotonic() < self._linger_until


def _kind(array: Any) -> tuple[Any, jax.sharding.Sharding]:
    # What `format` is made from; its own making is what takes so long.
    return array._pjrt_layout, array.sharding


def _why_not(array: Any) -> str | None:
    if not array.is_fully_addressable:
        return "has shards on devices of other processes; publish each process's own part"
    layout = array.format.layout
    order = getattr(layout, "major_to_minor", None)
    if order is not None and tuple(order) != tuple(range(array.ndim)):
        return f"has memory layout {layout}; only row-major arrays can travel"
    return None
