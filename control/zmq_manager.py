# SPDX-License-Identifier: Apache-2.0
"""What the prefill and the decode side of the ZMQ backend have in common."""

import abc
import contextlib
import dataclasses
import threading
from collections.abc import Callable

import jax
from absl import logging

from kvferry.control.connection import (
    KVManager,
    KVPages,
    KVReceiver,
    KVSender,
    TransferFailure,
)
from kvferry.control.control_loop import ControlLoop, ControlLoopError
from kvferry.control.engines.base import TransferEngine, shard_plan
from kvferry.control.engines.canary import self_test
from kvferry.control.ids import IdSource, new_generation, new_instance_id
from kvferry.control.kv_layout import KVLayout
from kvferry.control.messages import EngineInfo, Instance
from kvferry.control.security import CurveKeys, check_advertise, parse_address
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.tally import Tally
from kvferry.control.verified_pages import VerifiedPages

_SWEEP_SECONDS = 0.5

MAX_ROOM = 1 << 63


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Options of a manager.

    Attributes:
        host: Numeric address on which the side channel listens, and which peers are told.
        side_channel_port: Port of the side channel (prefill); 0 takes any free one.
        bootstrap_host: Name or address of the bootstrap server to register with (prefill).
        bootstrap_port: Its port; 0 registers nowhere.
        peer_timeout_seconds: Silence after which a peer counts as dead.
        connect_timeout_seconds: Time in which a connection must stand.
        orphan_timeout_seconds: Time that one leg of a room waits for the other to appear.
        progress_timeout_seconds: Time without progress after which a room fails.
        pull_timeout_seconds: Time after which a pull that brings nothing fails. An engine that
            cannot see its progress has this long for the whole pull.
        pull_workers: Pulls in progress at most; each holds a thread that sleeps most of the time.
        max_published_bytes: Published and not yet acknowledged bytes at most. A peer gets as much
            as it leaves free for others (half if it is alone), but always one chunk while anything
            is free, so there may be one chunk more than this.
        max_rooms: Rooms open at the same time at most.
        keys: CURVE keys; without them only loopback is used.
    """

    host: str = "127.0.0.1"
    side_channel_port: int = 0
    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: int = 0
    peer_timeout_seconds: float = 3.0
    connect_timeout_seconds: float = 0.9
    orphan_timeout_seconds: float = 30.0
    progress_timeout_seconds: float = 60.0
    pull_timeout_seconds: float = 30.0
    pull_workers: int = 32
    max_published_bytes: int = 1 << 30
    max_rooms: int = 65536
    keys: CurveKeys | None = None

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: If a value is out of range, naming it.
        """
        check_advertise(self.host)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            positive = field.name.endswith("_seconds") or field.name.startswith(("max_", "pull_"))
            if positive and not value > 0:
                raise ValueError(f"ControlOptions.{field.name} must be positive, got {value}")
            if field.name.endswith("_port") and not 0 <= value <= 65535:
                raise ValueError(f"ControlOptions.{field.name} must be a port, got {value}")

    def channel_options(self) -> ChannelOptions:
        """Returns the part that concerns single connections."""
        return ChannelOptions(
            peer_timeout_seconds=self.peer_timeout_seconds,
            connect_timeout_seconds=self.connect_timeout_seconds,
            keys=self.keys,
        )


class ZmqManager(KVManager):
    """Threads, engine and identity of a manager; the two roles derive from it.

    Args:
        options: See `ControlOptions`.
        layout: This process's KV cache.
        pages: Its pool; in `VerifiedPages` to have every transfer checked, on both sides.
        engine: A transfer engine that is not started.
        on_event: Called without arguments, from any thread, after each change of a leg. Must not
            block.
        loop: The process's control loop; by default the manager makes and ends its own.
    """

    role: str = ""

    def __init__(
        self,
        options: ControlOptions,
        layout: KVLayout,
        pages: KVPages,
        engine: TransferEngine,
        *,
        on_event: Callable[[], None],
        loop: ControlLoop | None = None,
    ) -> None:
        self.options = options
        self.pages = pages
        self.engine = engine
        self.on_event = on_event
        self.tally = Tally()
        self.ids = IdSource()
        self.lock = threading.Lock()
        self.channel_options = options.channel_options()
        self._own_loop = loop is None
        self.loop = loop or ControlLoop()
        self._layout = layout
        self._instance: Instance | None = None
        self._stopped = False

    @property
    def instance(self) -> Instance:
        """This process as peers see it.

        Raises:
            RuntimeError: If the manager is not started.
        """
        if self._instance is None:
            raise RuntimeError("the manager is not started; call start() first")
        return self._instance

    @property
    def failure(self) -> str | None:
        """Why transfers can no longer work in this process, or None."""
        if self.loop.failure is not None:
            return f"the control thread died: {self.loop.failure!r}"
        if self.engine.failure is not None:
            return f"transfer engine {self.engine.engine_name!r}: {self.engine.failure}"
        return None

    @property
    def not_ready(self) -> str | None:
        """Why no peer can reach this process for now, or None."""
        return None

    def start(self) -> None:
        """Starts the engine, tests it, and opens the side channel.

        Raises:
            EngineStartError: If the engine does not work here.
            PortInUseError: If a port is taken.
            InsecureBindError: If the side channel would listen beyond loopback without keys.
            OSError: If the name of the bootstrap server to register with (prefill) is unknown.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.engine.close)
            address = self.engine.start()
            self._warn_of_exposure()
            self_test(self.engine, address, self._test_specs())
            if self._own_loop:
                undo.callback(self.loop.stop)
            self.loop.start()
            self.loop.on_failure(self._on_loop_failure)
            info = EngineInfo(
                name=self.engine.engine_name,
                address=address,
                settings={
                    **self.engine.settings(),
                    "shards": shard_plan(self.pages.specs(1)),
                    "verify_kv": int(isinstance(self.pages, VerifiedPages)),
                },
                versions=dict(self.engine.versions()),
            )
            self._prepare()
            self._instance = self.loop.call(lambda: self._open(info))
            undo.pop_all()
        logging.info("%s manager %s started", self.role, self._instance.instance_id)

    def stop(self) -> None:
        """Fails what is open, tells the peers, and ends the threads. Idempotent.

        Raises:
            TimeoutError: If the control thread does not answer; all the rest has ended.
        """
        with self.lock:
            if self._stopped:
                return
            self._stopped = True
        # Each of these, whatever another one raises.
        with contextlib.ExitStack() as ends:
            ends.callback(self.engine.close)
            ends.callback(self._stop_threads)
            if self._own_loop:
                ends.callback(self.loop.stop)
            self.fail_all(TransferFailure("the server is shutting down", 503))
            if self.loop.alive:
                # A thread that dies meanwhile has closed its sockets itself.
                ends.enter_context(contextlib.suppress(ControlLoopError))
                self.loop.call(self._close)

    def open_sender(self, room: int) -> KVSender:
        """Opens the prefill leg of a room; see `KVManager.open_sender`."""
        raise RuntimeError(f"this is a {self.role} manager; it cannot send room {room}")

    def open_receiver(self, host: str, port: int, room: int) -> KVReceiver:
        """Opens the decode leg of a room; see `KVManager.open_receiver`."""
        raise RuntimeError(f"this is a {self.role} manager; it cannot receive room {room}")

    @abc.abstractmethod
    def fail_all(self, failure: TransferFailure) -> None:
        """Ends all open legs of this process."""

    @abc.abstractmethod
    def sweep(self) -> None:
        """Looks for what has timed out, and tells peers about progress. Loop thread."""

    @abc.abstractmethod
    def open_channel(self) -> int:
        """Opens sockets; returns the side channel's port, or 0. Loop thread."""

    @abc.abstractmethod
    def close_channel(self) -> None:
        """Closes sockets. Loop thread."""

    def _stop_threads(self) -> None:  # noqa: B027 (may be empty)
        """Ends threads other than the loop's."""

    def check_open(self, room: int) -> None:
        """Checks the arguments and the state for opening a leg.

        Raises:
            ValueError: If the room is out of range.
            RuntimeError: If the manager is not started.
        """
        if self._instance is None:
            raise RuntimeError("the manager is not started; call start() first")
        if not 0 <= room < MAX_ROOM:
            raise ValueError(f"room must be between 0 and 2**63 - 1, got {room}")

    def refusal_locked(self, num_rooms: int) -> TransferFailure | None:
        """Returns why no leg can be opened now, or None.

        The caller holds the lock from here until the leg is in its table: `stop`, and the death of
        the control thread, end what they find there, and nobody would end what comes after that.
        """
        if self._stopped:
            return TransferFailure("the server is shutting down", 503)
        if self.failure is not None:
            return TransferFailure(self.failure, 503)
        if num_rooms >= self.options.max_rooms:
            return TransferFailure(f"{num_rooms} rooms are open, which is the limit", 503)
        return None

    def _open(self, info: EngineInfo) -> Instance:
        port = self.open_channel()
        instance = Instance(
            instance_id=new_instance_id(),
            generation=new_generation(),
            role="prefill" if self.role == "prefill" else "decode",
            host=self.options.host,
            side_channel_port=port,
            layout=self._layout,
            engine=info,
        )
        self._instance = instance
        self._timer = self.loop.every(_SWEEP_SECONDS, self.sweep)
        self._opened()
        return instance

    def _prepare(self) -> None:  # noqa: B027 (only the prefill side resolves a name)
        """Called before anything is opened, where it may block."""

    def _opened(self) -> None:  # noqa: B027 (only the prefill side registers)
        """Called once the instance is known. Loop thread."""

    def _warn_of_exposure(self) -> None:
        if self.engine.exposure and not parse_address(self.options.host).is_loopback:
            logging.warning(
                "transfer engine %r listens on %s, which keys do not protect: %s Let only the peers"
                " reach its ports, or choose the zmq engine",
                self.engine.engine_name,
                self.options.host,
                self.engine.exposure,
            )

    def _close(self) -> None:
        self._timer.cancel()
        self.close_channel()

    def _on_loop_failure(self) -> None:
        self.fail_all(TransferFailure(self.failure or "the control thread died", 503))
        self.on_event()

    def _test_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Returns one spec of each kind that this process moves."""
        kinds = {
            (spec.shape, str(spec.dtype), str(spec.sharding)): spec for spec in self.pages.specs(1)
        }
        return list(kinds.values())[:8]
