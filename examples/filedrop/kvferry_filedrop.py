# SPDX-License-Identifier: Apache-2.0
"""A kvferry transfer engine that moves arrays through files, in a folder that both ends see.

What is published becomes one file: the length of a header, the header (JSON: the arrays' shapes and
dtypes, or an error), and the bytes. It appears under its name only when it is complete, and the one
pull that it is for takes it away by renaming it; both are single steps for the file system.
"""

import hashlib
import json
import os
import pathlib
import queue
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import logging

from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
    TransferTimeoutError,
    sharding_of,
)
from kvferry.control.engines.registry import transfer_engine
from kvferry.control.thread_boundary import GuardedThread

_LOOK_SECONDS = 0.002
_SWEEP_SECONDS = 0.2
_LENGTH = struct.Struct("<I")


def _file_of(folder: pathlib.Path, key: int) -> pathlib.Path:
    # The id is a secret of the two ends; its digest is not.
    return folder / hashlib.blake2b(b"filedrop", key=key.to_bytes(8, "little")).hexdigest()[:32]


def _leaves(arrays: Sequence[jax.Array] | Sequence[Spec]) -> list[list[object]]:
    return [[list(array.shape), str(array.dtype)] for array in arrays]


class _FilePull(Pull):
    """Looks for the file whenever it is asked whether it has ended."""

    def __init__(self, folder: str, key: int, specs: Sequence[Spec], seconds: float) -> None:
        self._folder, self._specs, self._seconds = pathlib.Path(folder), list(specs), seconds
        self._file = _file_of(self._folder, key)
        self._label = f"pull {key} from {folder}"
        self._until = time.monotonic() + seconds
        self._host: list[np.ndarray] | None = None
        self._error: TransferError | None = None

    def wait(self, timeout_seconds: float) -> bool:
        until = time.monotonic() + timeout_seconds
        while not self._look() and (left := min(until, self._until) - time.monotonic()) > 0:
            time.sleep(min(_LOOK_SECONDS, left))
        return self._look()

    def result(self) -> list[jax.Array]:
        if self._error is not None:
            raise self._error
        if self._host is None:
            raise TransferError(f"{self._label}: has not ended")
        return list(jax.device_put(self._host, [sharding_of(each) for each in self._specs]))

    def cancel(self) -> None:
        if self._host is None and self._error is None:
            self._error = TransferError(f"{self._label}: cancelled")

    def _look(self) -> bool:
        if self._host is not None or self._error is not None:
            return True
        taken = self._file.with_suffix(".taken")
        try:
            if not self._folder.is_dir():
                raise TransferError(f"{self._label}: there is no such folder; its owner has ended")
            os.rename(self._file, taken)
            with taken.open("rb") as file:
                taken.unlink()  # Nobody else needs the name; the bytes live until it is closed.
                self._host = self._read(file.fileno())
        except FileNotFoundError:
            if time.monotonic() >= self._until:
                text = f"{self._label}: not done in {self._seconds:.1f} s"
                self._error = TransferTimeoutError(text)
        except (OSError, ValueError) as error:
            self._error = TransferError(f"{self._label}: {error}")
        except TransferError as error:
            self._error = error
        return self._host is not None or self._error is not None

    def _read(self, fd: int) -> list[np.ndarray]:
        with open(fd, "rb", closefd=False) as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(length))
            if "error" in header:
                raise TransferError(f"{self._label}: {header['error']}")
            if header["leaves"] != _leaves(self._specs):
                raise TransferError(
                    f"{self._label}: published {header['leaves']}, asked for {_leaves(self._specs)}"
                )
            return [
                np.fromfile(file, np.uint8, spec.size * spec.dtype.itemsize)
                .view(spec.dtype)
                .reshape(spec.shape)
                for spec in self._specs
            ]


@transfer_engine("filedrop")
class FileDropEngine(TransferEngine):
    """Moves arrays through files.

    Args:
        options: Ignored but for being kept.
    """

    exposure = ""  # The folder is for one user only.

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._folder: pathlib.Path | None = None
        self._lock = threading.Lock()
        self._published: dict[int, float] = {}  # Id -> when it expires.
        self._to_write: queue.SimpleQueue[tuple[int, list[jax.Array]] | None] = queue.SimpleQueue()
        self._writer = GuardedThread(self._write_all, "filedrop")

    @property
    def failure(self) -> str | None:
        """Set when nothing is written any more; the servers' health shows it."""
        return self._writer.failure

    def start(self) -> str:
        """Makes a folder; its path is the address."""
        try:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="kvferry-filedrop-"))
        except OSError as error:
            raise EngineStartError(f"transfer engine 'filedrop' has no folder: {error}") from error
        self._writer.start()
        return str(self._folder)

    def settings(self) -> Mapping[str, int | str]:
        """Returns nothing: any two fit that see the same files."""
        return {}

    def publish(self, key: int, arrays: Sequence[jax.Array], deadline_seconds: float) -> None:
        """Has the arrays written by another thread, as they may still be computing."""
        if any(array.is_deleted() or not array.is_fully_addressable for array in arrays):
            raise ValueError(f"cannot publish {key}: an array is deleted or not all here")
        with self._lock:
            if self._folder is None:
                raise TransferError(f"cannot publish {key}: engine 'filedrop' is not running")
            if key in self._published:
                raise ValueError(f"key {key} is published already")
            self._published[key] = time.monotonic() + deadline_seconds
        self._to_write.put((key, list(arrays)))

    def release(self, key: int, *, delivered: bool) -> None:
        """Removes the file."""
        with self._lock:
            if self._published.pop(key, None) is not None and self._folder is not None:
                _file_of(self._folder, key).unlink(missing_ok=True)

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        """Starts to look for the file."""
        if self._folder is None:
            raise TransferError(f"pull {key}: engine 'filedrop' is not running")
        return _FilePull(address, key, specs, deadline_seconds)

    def counters(self) -> dict[str, int]:
        """Returns how much is published. A pull that has ended holds nothing."""
        return {"published_keys": len(self._published), "draining_pulls": 0}

    def close(self) -> None:
        """Removes the folder."""
        with self._lock:
            folder, self._folder = self._folder, None
            self._published.clear()
        if folder is not None:
            self._to_write.put(None)
            self._writer.join(5.0)
            shutil.rmtree(folder, ignore_errors=True)

    def _write_all(self) -> None:
        while True:
            try:
                item = self._to_write.get(timeout=_SWEEP_SECONDS)
            except queue.Empty:
                now = time.monotonic()
                for key in [key for key, until in list(self._published.items()) if until <= now]:
                    self.release(key, delivered=False)
                continue
            if item is None:
                return
            try:
                self._write(*item)
            except OSError as error:
                # A full disk, say. The pull ends at its deadline.
                logging.error("engine 'filedrop' cannot write: %s", error)
            del item  # An idle thread must not keep the arrays.

    def _write(self, key: int, arrays: list[jax.Array]) -> None:
        folder = self._folder
        if folder is None:
            return
        target = _file_of(folder, key)
        parts: list[np.ndarray] = []
        header: dict[str, object] = {"leaves": _leaves(arrays)}
        try:
            parts = [np.ascontiguousarray(array) for array in jax.device_get(arrays)]
        except jax.errors.JaxRuntimeError as error:
            header = {"error": f"the published arrays failed: {error}"}
        text = json.dumps(header).encode()
        unfinished = target.with_suffix(".part")
        with unfinished.open("wb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            for part in parts:
                file.write(part.reshape(-1).view(np.uint8).data)
        with self._lock:
            if key in self._published:
                os.rename(unfinished, target)
            else:
                unfinished.unlink()  # Released meanwhile.
