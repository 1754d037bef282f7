# SPDX-License-Identifier: Apache-2.0
"""A transfer engine within one process, for tests and warm-up."""

import itertools
import threading
import time
from collections.abc import Mapping, Sequence

import jax

from kvferry.control.engines.base import (
    EngineOptions,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
    TransferTimeoutError,
    sharding_of,
)
from kvferry.control.engines.registry import transfer_engine


class FakeNetwork:
    """What connects the fake engines of a process, and a place to break things in tests.

    Attributes:
        held: While set, pulls do not arrive.
        error: If not empty, every pull fails with this text.
        progress: What pulls report as theirs.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.published: dict[tuple[str, int], list[jax.Array]] = {}
        self.held = False
        self.error = ""
        self.progress = 0
        self._names = itertools.count(1)

    def new_address(self) -> str:
        """Returns an address that no other engine of this network has."""
        return f"fake:{next(self._names)}"

    def set(self, *, held: bool | None = None, error: str | None = None) -> None:
        """Changes `held` or `error` and wakes the pulls that wait."""
        with self.changed:
            self.held = self.held if held is None else held
            self.error = self.error if error is None else error
            self.changed.notify_all()


class _FakePull(Pull):
    def __init__(
        self, network: FakeNetwork, source: tuple[str, int], specs: Sequence[Spec], seconds: float
    ) -> None:
        self._network = network
        self._source = source
        self._specs = list(specs)
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._arrays: list[jax.Array] | None = None
        self._error: TransferError | None = None

    def wait(self, timeout_seconds: float) -> bool:
        with self._network.changed:
            until = min(time.monotonic() + timeout_seconds, self._until)
            while not self._step():
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._network.changed.wait(left)
            if time.monotonic() >= self._until and not self._step():
                key = self._source[1]
                self._error = TransferTimeoutError(f"pull {key} not done in {self._seconds} s")
            return self._step()

    @property
    def progress(self) -> int:
        return self._network.progress

    def result(self) -> list[jax.Array]:
        if self._error is not None:
            raise self._error
        if self._arrays is None:
            raise TransferError(f"pull {self._source[1]} has not ended")
        return self._arrays

    def cancel(self) -> None:
        self._error = self._error or TransferError(f"pull {self._source[1]} was cancelled")

    def _step(self) -> bool:
        if self._arrays is not None or self._error is not None:
            return True
        if self._network.held:
            return False
        if self._network.error:
            self._error = TransferError(self._network.error)
            return True
        arrays = self._network.published.pop(self._source, None)
        if arrays is None:
            return False  # As with real engines: nothing tells that it will never come.
        found = [(array.shape, array.dtype) for array in arrays]
        wanted = [(spec.shape, spec.dtype) for spec in self._specs]
        if found != wanted:
            self._error = TransferError(f"published {found}, asked for {wanted}")
        else:
            self._arrays = [
                jax.device_put(array, sharding_of(spec))
                for array, spec in zip(arrays, self._specs, strict=True)
            ]
        return True


@transfer_engine("fake")
class FakeEngine(TransferEngine):
    """Hands arrays over within one process.

    Args:
        options: Ignored but for being kept.
        network: Shared by the engines that are to reach each other; by default one of its own.
    """

    exposure = ""

    def __init__(self, options: EngineOptions, network: FakeNetwork | None = None) -> None:
        super().__init__(options)
        self._network = network or FakeNetwork()
        self._address = ""

    def start(self) -> str:
        """Returns a new address."""
        self._address = self._network.new_address()
        return self._address

    def settings(self) -> Mapping[str, int | str]:
        """Returns nothing: any two fake engines fit."""
        return {}

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Keeps the arrays until they are pulled or released.

        Args:
            key: One-shot id.
            arrays: What to publish.
            deadline_seconds: Ignored.

        Raises:
            ValueError: If the key is published, or an array is deleted.
        """
        if any(array.is_deleted() for array in arrays):
            raise ValueError(f"cannot publish {key}: an array is deleted")
        with self._network.changed:
            if (self._address, key) in self._network.published:
                raise ValueError(f"key {key} is published already")
            self._network.published[self._address, key] = list(arrays)
            self._network.changed.notify_all()

    def release(self, key: int, *, delivered: bool) -> None:
        """Drops what is published under `key`."""
        with self._network.changed:
            self._network.published.pop((self._address, key), None)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts a pull from an engine of the same network."""
        return _FakePull(self._network, (address, key), specs, deadline_seconds)

    def counters(self) -> dict[str, int]:
        """Returns how many keys are published by this engine."""
        published = sum(address == self._address for address, _ in self._network.published)
        return {"published_keys": published, "draining_pulls": 0}

    def close(self) -> None:
        """Drops everything that this engine has published."""
        with self._network.changed:
            for source in [each for each in self._network.published if each[0] == self._address]:
                del self._network.published[source]
