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
* Cancelling a pull while bytes are in flight leaks receive buffers until the process is wedged: a
  pull that is given up is left to drain, and counted until it has.
"""

import datetime
import importlib.metadata
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental import transfer

from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
    TransferTimeoutError,
)
from kvferry.control.engines.canary import default_sharding
from kvferry.control.engines.ports import claim_port
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.security import (
    PortInUseError,
    check_advertise,
    host_port,
    parse_address,
)

_TICK_KEY = 2**64 - 1  # No id of ours has more than 53 bits.
_TICK_SECONDS = 0.2
_LINGER_SECONDS = 30.0
_DEADLINE_MARGIN_SECONDS = 1.0
_POLL_SECONDS = (0.0002, 0.002)
_DRAIN_GRACE_SECONDS = 60.0


def _clock_time(seconds_from_now: float) -> datetime.datetime:
    now = datetime.datetime.now(datetime.UTC)
    return now + datetime.timedelta(seconds=seconds_from_now)


def _is_ready(array: Any) -> bool:
    # Any: the method is there, but jax.Array does not declare it.
    return bool(array.is_ready())


def _layout(array: Any) -> Any:
    return array.format.layout


def _layout_is_default(array: jax.Array) -> bool:
    order = getattr(_layout(array), "major_to_minor", None)
    return order is None or tuple(order) == tuple(range(array.ndim))


class _JaxPull(Pull):
    def __init__(
        self,
        engine: "JaxEngine",
        source: tuple[str, int],
        arrays: list[jax.Array],
        empty: dict[int, jax.Array],
        deadline_seconds: float,
    ) -> None:
        self._engine = engine
        self._address, key = source
        self._label = f"pull {key} from {self._address}"
        self._arrays = arrays
        self._empty = empty
        self._seconds = deadline_seconds
        self._until = time.monotonic() + deadline_seconds
        self._next = 0
        self._error: TransferError | None = None

    def wait(self, timeout_seconds: float) -> bool:
        until = min(time.monotonic() + timeout_seconds, self._until)
        pause = _POLL_SECONDS[0]
        while not self._ended():
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _POLL_SECONDS[1])
        if not self._ended() and time.monotonic() >= self._until:
            done = f"{self._next} of {len(self._arrays)} arrays had arrived"
            self._give_up(
                TransferTimeoutError(f"{self._label}: not done in {self._seconds:.1f} s, {done}")
            )
        return self._ended()

    def result(self) -> list[jax.Array]:
        if self._error is not None:
            raise self._error
        if not self._ended():
            raise TransferError(f"{self._label}: has not ended")
        try:
            # Ready is not healthy: an array that carries an error is ready too.
            jax.block_until_ready(self._arrays)
        except jax.errors.JaxRuntimeError as error:
            self._engine.disconnect(self._address)
            self._error = TransferError(f"{self._label}: {error}")
            raise self._error from error
        arrived = iter(self._arrays)
        count = len(self._arrays) + len(self._empty)
        return [self._empty[i] if i in self._empty else next(arrived) for i in range(count)]

    def cancel(self) -> None:
        if not self._ended():
            self._give_up(TransferError(f"{self._label}: cancelled"))

    def _ended(self) -> bool:
        if self._error is not None:
            return True
        while self._next < len(self._arrays) and _is_ready(self._arrays[self._next]):
            self._next += 1
        return self._next == len(self._arrays)

    def _give_up(self, error: TransferError) -> None:
        self._error = error
        self._engine.drain(self._arrays)
        self._engine.disconnect(self._address)
        self._arrays = []


@transfer_engine("jax")
class JaxEngine(TransferEngine):
    """Moves arrays with `jax.experimental.transfer`.

    Args:
        options: `host` must be numeric and not a wildcard; `channels`, `chunk_bytes` and
            `parallel_copies` are the library's transports, transfer size and copy limit.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._server: Any = None
        self._address = ""
        self._claim = claim_port(options.host, 0)
        self._lock = threading.Condition()
        self._published: dict[int, int] = {}
        self._linger_until = 0.0
        self._connections: dict[str, Any] = {}
        self._draining: list[tuple[float, list[jax.Array]]] = []
        self._tick_thread: threading.Thread | None = None
        self._closed = False

    @property
    def failure(self) -> str | None:
        """Set when abandoned pulls may hold all receive buffers: no pull could then end well."""
        with self._lock:
            self._sweep()
            stuck = [since for since, _ in self._draining if _age(since) > _DRAIN_GRACE_SECONDS]
        if len(stuck) < self.options.parallel_copies:
            return None
        return (
            f"{len(stuck)} pulls were given up up to {_age(min(stuck)):.0f} s ago and still hold"
            " receive buffers; restart this process"
        )

    def start(self) -> str:
        """Opens the transfer server.

        Returns:
            Its address, "ip:port".

        Raises:
            PortInUseError: If the port is taken.
            EngineStartError: If the address is a wildcard or not numeric, or the library refuses.
        """
        host, port = self.options.host, self.options.port
        try:
            check_advertise(host)
            self._claim = claim_port(host, port)
        except PortInUseError:
            raise
        except (OSError, ValueError) as error:
            raise EngineStartError(f"transfer engine 'jax' cannot start: {error}") from error
        if not parse_address(host).is_loopback:
            logging.warning(
                "no keys protect the transfer ports on %s; let only peers reach them", host
            )
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
        self._tick_array = jnp.zeros((1,), jnp.uint8)
        spec = jax.ShapeDtypeStruct((1,), jnp.uint8, sharding=default_sharding())
        self._gone_array = transfer.make_error_array(spec, "released by the publisher")
        self._tick_thread = threading.Thread(target=self._tick, name="kv-jax-tick", daemon=True)
        self._tick_thread.start()
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
        for index, array in enumerate(arrays):
            _check_publishable(key, index, array)
        travelling = [array for array in arrays if array.size]
        with self._lock:
            if self._server is None or self._closed:
                raise TransferError(f"cannot publish {key}: transfer engine 'jax' is not running")
            if key in self._published:
                raise ValueError(f"key {key} is published already; ids are for one use")
            self._published[key] = len(travelling)
            self._lock.notify_all()
        if not travelling:
            return
        timeout = _clock_time(deadline_seconds + _DEADLINE_MARGIN_SECONDS)
        try:
            self._server.await_pull(key, travelling, timeout=timeout)
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
            with self._lock:
                self._published.pop(key, None)
            raise TransferError(f"cannot publish {key}: {error}") from error

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
            self._lock.notify_all()

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
            TransferError: If the engine is not running, or the address is malformed.
        """
        placed = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding or default_sharding())
            for s in specs
        ]
        empty = {
            index: jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
            for index, spec in enumerate(placed)
            if 0 in spec.shape
        }
        wanted = [spec for index, spec in enumerate(placed) if index not in empty]
        try:
            arrays = self._connect(address).pull(key, wanted) if wanted else []
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
            self.disconnect(address)
            raise TransferError(f"pull {key} from {address}: {error}") from error
        return _JaxPull(self, (address, key), list(arrays), empty, deadline_seconds)

    def counters(self) -> dict[str, int]:
        """Returns published keys, pulls that drain, and open connections."""
        with self._lock:
            self._sweep()
            return {
                "published_keys": len(self._published),
                "draining_pulls": len(self._draining),
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
        if self._tick_thread is not None:
            self._tick_thread.join(2.0)
        self._claim.close()

    def disconnect(self, address: str) -> None:
        """Forgets the connection to a peer, so that the next pull makes a new one."""
        with self._lock:
            self._connections.pop(address, None)

    def drain(self, arrays: list[jax.Array]) -> None:
        """Keeps the arrays of a pull that was given up until the library is done with them."""
        with self._lock:
            self._draining.append((time.monotonic(), arrays))

    def _connect(self, address: str) -> Any:
        with self._lock:
            if self._server is None or self._closed:
                raise TransferError("transfer engine 'jax' is not running")
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            return self._connections[address]

    def _sweep(self) -> None:
        self._draining = [
            (since, arrays) for since, arrays in self._draining if not all(map(_is_ready, arrays))
        ]

    def _tick(self) -> None:
        while True:
            with self._lock:
                while not (self._closed or self._expiring()):
                    self._lock.wait()
                if self._closed:
                    return
                self._server.await_pull(_TICK_KEY, [self._tick_array], timeout=_clock_time(-1.0))
                self._lock.wait(_TICK_SECONDS)

    def _expiring(self) -> bool:
        return bool(self._published) or time.monotonic() < self._linger_until


def _age(since: float) -> float:
    return time.monotonic() - since


def _check_publishable(key: int, index: int, array: jax.Array) -> None:
    what = f"cannot publish {key}: array {index}"
    if array.is_deleted():
        raise ValueError(f"{what} is deleted or donated")
    if not array.is_fully_addressable:
        raise ValueError(
            f"{what} has shards on devices of other processes; publish each process's own part"
        )
    if not _layout_is_default(array):
        raise ValueError(
            f"{what} has memory layout {_layout(array)}; only row-major arrays can travel"
        )
