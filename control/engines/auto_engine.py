# SPDX-License-Identifier: Apache-2.0
"""A transfer engine that takes shared memory within a host and the network beyond it.

It runs two engines: `shm`, and the one for the network (`jax` on an accelerator, else `tcp`). Its
address carries the addresses of both. The pulling side decides, once per peer: if it reaches the
peer's socket in the kernel's name space, which no other host can, it is on the same host and takes
`shm`. The publishing side need not know: what is published is offered by both, and neither copies
anything before it is asked. Until its release an offer counts in the bounds of both.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence

import jax
from absl import logging

from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
)
from kvferry.control.engines.canary import self_test
from kvferry.control.engines.registry import create_engine, transfer_engine
from kvferry.control.engines.shm_engine import ShmEngine
from kvferry.control.engines.shm_link import connect

_MAX_PEERS = 1024


def _parse(address: str) -> dict[str, str]:
    """Returns the address of each engine.

    Raises:
        TransferError: If it is not an address of this engine.
    """
    parts = [part.partition("=") for part in address.split(",")]
    if not all(name and separator and where for name, separator, where in parts):
        raise TransferError(f"{address!r} is not an address of transfer engine 'auto'")
    return {name: where for name, _, where in parts}


def _try_out(engine: TransferEngine, address: str) -> None:
    self_test(engine, address, [])
    engine.disconnect(address)


@transfer_engine("auto")
class AutoEngine(TransferEngine):
    """Chooses between shared memory and the network for each peer.

    Args:
        options: For the network engine.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        network = "tcp" if jax.default_backend() == "cpu" else "jax"
        self._network = create_engine(network, options)
        self._shm = ShmEngine(options, eager=False)
        self._engines: dict[str, TransferEngine] = {network: self._network, "shm": self._shm}
        self.exposure = self._network.exposure
        self._address = ""
        self._lock = threading.Lock()
        self._choices: dict[str, tuple[TransferEngine, str]] = {}

    @property
    def failure(self) -> str | None:
        """See `TransferEngine.failure`."""
        for name, engine in self._engines.items():
            if engine.failure is not None:
                return f"{name}: {engine.failure}"
        return None

    def start(self) -> str:
        """Starts both engines and tests each. Without shared memory the network has to do.

        Returns:
            The address: those of the engines, by name.

        Raises:
            PortInUseError: If the port is taken.
            EngineStartError: If the network engine cannot work here.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            addresses = {self._network.engine_name: self._network.start()}
            try:
                addresses["shm"] = self._shm.start()
                _try_out(self._shm, addresses["shm"])
            except EngineStartError as error:
                logging.warning("without shared memory: %s", error)
                self._shm.close()
                del self._engines["shm"]
                addresses.pop("shm", None)
            _try_out(self._network, addresses[self._network.engine_name])
            undo.pop_all()
        self._address = ",".join(f"{name}={where}" for name, where in addresses.items())
        return self._address

    def settings(self) -> Mapping[str, int | str]:
        """Returns the network engine and what must be equal for it."""
        return {"network": self._network.engine_name, **self._network.settings()}

    def versions(self) -> Mapping[str, str]:
        """Returns those of the network engine."""
        return self._network.versions()

    def has_room(self, specs: Sequence[Spec]) -> bool:
        """Whether all engines have room."""
        return all(engine.has_room(specs) for engine in self._engines.values())

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Offers the arrays through all engines; see `TransferEngine.publish`."""
        with contextlib.ExitStack() as undo:
            for engine in self._engines.values():
                engine.publish(key, arrays, deadline_seconds)
                undo.callback(engine.release, key, delivered=False)
            undo.pop_all()

    def release(self, key: int, *, delivered: bool) -> None:
        """Lets go of what was published under `key`."""
        for engine in self._engines.values():
            engine.release(key, delivered=delivered)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts a pull through the engine chosen for the peer; see `TransferEngine.pull`."""
        engine, where = self._choose(address)
        return engine.pull(where, key, specs, deadline_seconds)

    def disconnect(self, address: str) -> None:
        """Drops connections to a peer. What was chosen for it stays."""
        chosen = self._choices.get(address)
        if chosen is not None:
            chosen[0].disconnect(chosen[1])

    def counters(self) -> dict[str, int]:
        """Returns what the engines count, by engine, and the usual sums."""
        counted = {name: engine.counters() for name, engine in self._engines.items()}
        return {
            "published_keys": max(each["published_keys"] for each in counted.values()),
            "draining_pulls": sum(each["draining_pulls"] for each in counted.values()),
            **{
                f"{name}_{what}": value
                for name, each in counted.items()
                for what, value in each.items()
            },
        }

    def close(self) -> None:
        """Closes all engines."""
        for engine in self._engines.values():
            engine.close()

    def _choose(self, address: str) -> tuple[TransferEngine, str]:
        with self._lock:
            chosen = self._choices.get(address)
            if chosen is not None:
                return chosen
        addresses = _parse(address)
        name, reason = self._network.engine_name, "it offers no shared memory"
        if "shm" not in self._engines:
            reason = "this process has no shared memory"
        elif "shm" in addresses:
            try:
                connect(addresses["shm"]).close()
                name, reason = "shm", "it is on this host"
            except OSError as error:
                reason = f"it is not on this host, or not of this user ({error})"
        if name not in addresses:
            raise TransferError(f"the peer at {address} does not offer transfer engine {name!r}")
        chosen = self._engines[name], addresses[name]
        with self._lock:
            if len(self._choices) >= _MAX_PEERS:
                self._choices.clear()
            known = self._choices.setdefault(address, chosen)
        if known is chosen and address != self._address:
            logging.info("pages from %s travel by %s: %s", address, name, reason)
        return known
