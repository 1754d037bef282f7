# SPDX-License-Identifier: Apache-2.0
"""What a transfer engine is: it moves arrays from the process that published them to one puller.

An engine knows nothing of rooms, pages or requests. The control layer hands it ids that are
one-shot and unguessable, tells the peer over its own channel that something is published, and only
then does the peer pull. So an engine never sees a pull that is early, doubled or made up, unless
the peer misbehaves, and then the deadline of the pull ends it.

To write an engine:

1. Derive from `TransferEngine`, give it a name with `@transfer_engine("mine")`, take one
   `EngineOptions` in the constructor, and list the class in the entry-point group
   `kvferry.transfer_engines` of your distribution (`mine = "my_package.my_module:MyEngine"`).
2. `start()` opens ports and returns the address that goes to peers: numeric and reachable.
3. `publish()` is called on the step thread and must not block. The arrays may not be computed yet.
   Hold them until `release()` or the deadline.
4. `pull()` is called on worker threads. It returns a `Pull` at once or after a short while; its
   `wait()` is polled, so that an abort is noticed.
5. Report failures as `TransferError`. An engine never hands out arrays that were not completely
   received, and never raises anything else for what a peer did.
6. `settings()` names whatever must be equal on both ends. `exposure` says what its ports give
   away beyond loopback.
7. `release()` and `close()` may be called twice, and for ids that are unknown.
8. Put it through the tests of all engines; examples/filedrop is an engine of another distribution,
   and its README tells how.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax

from kvferry.control.security import CurveKeys

Spec: TypeAlias = jax.ShapeDtypeStruct


class TransferError(Exception):
    """A transfer failed. The message says which one, where from, and what to do if anything."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer did not finish before its deadline."""


class EngineStartError(RuntimeError):
    """An engine cannot work on this machine or with these options; the process must not serve."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options common to all engines; each takes what it needs.

    Attributes:
        host: Numeric address to listen on, which is also the one that peers are told.
        port: Port to listen on; 0 takes any free one.
        channels: Parallel connections per peer; the same on both ends. At least 1.
        chunk_bytes: Bytes handed to a connection at a time; the same on both ends.
        parallel_copies: Staging copies in flight. At least 1.
        keys: CURVE keys, for engines whose sockets can use them; None leaves those on loopback.
    """

    host: str = "127.0.0.1"
    port: int = 0
    channels: int = 8
    chunk_bytes: int = 512 << 10
    parallel_copies: int = 16
    keys: CurveKeys | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: If a count is out of range, naming it and its value.
        """
        for name, low, high in (
            ("port", 0, 65535),
            ("channels", 1, 64),
            ("chunk_bytes", 4096, 1 << 30),
            ("parallel_copies", 1, 256),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(
                    f"EngineOptions.{name} must be between {low} and {high}, got {value}"
                )


class Pull(abc.ABC):
    """A pull in progress. Used by one thread."""

    @abc.abstractmethod
    def wait(self, timeout_seconds: float) -> bool:
        """Waits for the end of the pull, be it success, failure or deadline.

        Args:
            timeout_seconds: Longest wait; 0 only looks.

        Returns:
            Whether the pull has ended.
        """

    @property
    def progress(self) -> int:
        """A number that grows while data arrives; constant if the engine cannot see that."""
        return 0

    @abc.abstractmethod
    def result(self) -> list[jax.Array]:
        """Returns the arrays of a pull that has ended well, in the order of its specs.

        Returns:
            Healthy arrays: they have arrived and carry no error. On an accelerator their copy into
            its memory may still be under way.

        Raises:
            TransferError: If the pull failed or its deadline passed.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """Gives the pull up. What still arrives is dropped."""


class TransferEngine(abc.ABC):
    """Moves arrays between processes; see the module text for how to write one.

    Attributes:
        engine_name: Name under which it is registered; set by `@transfer_engine`.
        exposure: What someone who reaches the engine's ports can see or do although there are keys,
            in one sentence for the operator; empty if nothing.
        options: As given.
    """

    engine_name: str = ""
    exposure: str = "it does not say how it protects its ports."

    def __init__(self, options: EngineOptions):
        """Keeps the options; opens nothing.

        Args:
            options: See `EngineOptions`.
        """
        self.options = options

    @property
    def failure(self) -> str | None:
        """Why the engine can no longer be relied upon, or None. For the process's health."""
        return None

    @abc.abstractmethod
    def start(self) -> str:
        """Opens what peers connect to.

        Returns:
            The address for `pull` in other processes.

        Raises:
            EngineStartError: If it cannot work here (port taken, address not local, ...).
        """

    @abc.abstractmethod
    def settings(self) -> Mapping[str, int | str]:
        """Returns what must be equal on both ends, by name."""

    def versions(self) -> Mapping[str, str]:
        """Returns versions worth logging when two ends differ, by name."""
        return {}

    def has_room(self, specs: Sequence[Spec]) -> bool:
        """Tells whether such arrays can be published now, or only after a release.

        Whoever is refused asks again when a `release` has returned, and not before the next one.

        Args:
            specs: Shape and dtype of each array.

        Returns:
            Whether there is room; it stays until the next `publish`.
        """
        del specs
        return True

    @abc.abstractmethod
    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Makes arrays available for exactly one pull.

        Args:
            key: One-shot id, 0 <= key < 2**53.
            arrays: What to publish; may still be computing. Not donated or deleted before release.
            deadline_seconds: After this time the engine may drop them by itself.

        Raises:
            ValueError: If `key` is already published, or an array cannot travel (deleted, not
                addressable from this process, or not in the default memory layout).
            TransferError: If the engine has failed, or has no room (see `has_room`).
        """

    @abc.abstractmethod
    def release(self, key: int, *, delivered: bool) -> None:
        """Lets go of what was published under `key`; its memory is free once this returns or soon.

        Args:
            key: As published; unknown ids are ignored.
            delivered: Whether the puller has said that it has everything. If not, a pull that is
                still to come or in progress ends with an error.
        """

    @abc.abstractmethod
    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts to fetch what a peer has published.

        Args:
            address: The peer's `start()` result.
            key: The id, after the peer has said that it is published.
            specs: Shape, dtype and sharding of each array, equal to what was published. A missing
                sharding means the first local device.
            deadline_seconds: Time from now after which the pull fails.

        Returns:
            The pull in progress.

        Raises:
            TransferError: If it cannot even be started.
        """

    def disconnect(self, address: str) -> None:  # noqa: B027
        """Drops connections to a peer, because it may be gone; the next pull makes new ones.

        Args:
            address: The peer's address; unknown ones are ignored.
        """

    @abc.abstractmethod
    def counters(self) -> dict[str, int]:
        """Returns gauges of what the engine holds: at least `published_keys`, `draining_pulls`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases everything; pulls in progress fail. May be called twice."""


def sharding_of(spec: Spec) -> jax.sharding.Sharding:
    """Returns the sharding of an array; if none is given, it goes to the first local device."""
    return spec.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def shard_plan(specs: Sequence[Spec]) -> str:
    """Describes how arrays are cut over devices, so that two processes can compare it.

    Engines move shards by their position. Two shardings with shards of equal sizes but in another
    order would exchange parts of an array without any error.

    Args:
        specs: Arrays with their shardings.

    Returns:
        For each kind of array its shard shape and the offsets of its shards, in device order.
    """
    plans: dict[str, None] = {}
    for spec in specs:
        offsets = "whole"
        shard_shape = spec.shape
        if spec.sharding is not None and spec.sharding.num_devices > 1:
            shard_shape = spec.sharding.shard_shape(spec.shape)
            indices = spec.sharding.devices_indices_map(spec.shape).values()
            offsets = " ".join(",".join(str(cut.start or 0) for cut in index) for index in indices)
        plans[f"{spec.dtype}{list(shard_shape)} at {offsets}"] = None
    return "; ".join(plans)
