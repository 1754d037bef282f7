# SPDX-License-Identifier: Apache-2.0
"""A prefill or decode process that can be hurt at a chosen moment, and tells when it noticed what.

Unlike a plain `PeerProcess` it imports everything first and starts when it is told to, so that one
can take the place of another at once; and it may tell its peers other ports than those it listens
on, which a proxy then stands for.
"""

import dataclasses
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from kvferry.control.engines.base import Pull, Spec, TransferEngine
from kvferry.control.kv_poll import KVPoll
from kvferry.control.zmq_connection import create_manager
from kvferry.tests.control import pairs
from kvferry.tests.control.peer_process import Peer, PeerProcess, main

# Large enough that a pull takes a while: 16 pages of three layers are 96 MiB.
PAGE_SHAPE = (16, 64, 1024)
NUM_PAGES = 20
LONG_PAGES = 16

_ANSWER_SECONDS = 30.0
_UNDER_WAY_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class LegState:
    """A leg as its process sees it.

    Attributes:
        state: Name of the `KVPoll` state.
        reason: Why it failed, or an empty text.
        status: HTTP status of the failure, or 0.
        opened: When it was opened, in seconds of the machine's monotonic clock.
        finished: When it ended.
    """

    state: str
    reason: str
    status: int
    opened: float
    finished: float | None

    @property
    def ended(self) -> bool:
        return self.state in ("Failed", "Success")


class Member(PeerProcess):
    """One process: made at once, started later."""

    module = "kvferry.tests.control.fault_member"

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.stopped = False
        self._owed = 0

    @property
    def awake(self) -> bool:
        """Whether it can answer."""
        return not self.stopped and self._process.poll() is None

    def start(self, **options: Any) -> Self:
        """Opens its ports; see `Peer` and `_Member` for the options."""
        self._write(options)
        self.ports = self._read()
        return self

    def __call__(self, command: str, **values: Any) -> Any:
        while self._owed:
            self._owed -= 1
            self._read()
        return super().__call__(command, **values)

    def post(self, command: str, **values: Any) -> None:
        """As a call, for a process that may not live to answer."""
        self._owed += 1
        self._write({"command": command, **values})

    def end(self) -> None:
        """Ends it at once, whatever it does."""
        self._process.kill()
        self.close()

    def signal(self, number: int) -> None:
        """Kills, stops or continues it."""
        self._process.send_signal(number)
        self.note(number)

    def note(self, number: int) -> None:
        """Takes note of a signal that somebody else has sent."""
        self.stopped = number == signal.SIGSTOP
        if number == signal.SIGKILL:
            self._process.wait(_ANSWER_SECONDS)

    def leg(self, room: int) -> LegState:
        return LegState(**self("leg", room=room))

    def _write(self, values: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _ANSWER_SECONDS)
        assert readable, f"process {self.pid} does not answer"
        return super()._read()


class _HookedEngine:
    """Does something to a process while a pull is under way."""

    def __init__(self, engine: TransferEngine) -> None:
        self._pull = engine.pull
        self.target: tuple[int, int, str] | None = None
        self.fired: float | None = None

    def pull(self, address: str, key: int, specs: Sequence[Spec], deadline_seconds: float) -> Pull:
        pull = self._pull(address, key, specs, deadline_seconds)
        if self.target is not None:
            number, pid, path = self.target
            self.target = None
            ended = pull.wait(_UNDER_WAY_SECONDS)
            with open(path, "w") as file:
                file.write(f"{time.monotonic()} {int(ended)}\n")
            os.kill(pid, number)
        return pull


class _Member(Peer):
    """The inside of the process.

    Args:
        options: As of `Peer`, and "advertise": the ports that peers are told, by name.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__({"page_shape": PAGE_SHAPE, "num_pages": NUM_PAGES, **options})

    def prepare(self, options: dict[str, Any]) -> None:
        manager: Any = self._manager
        advertised = options.get("advertise", {})
        self._hook = _HookedEngine(manager.engine)
        manager.engine.pull = self._hook.pull
        if "engine" in advertised:
            start = manager.engine.start

            def start_behind_proxy() -> str:
                host, _, _ = start().rpartition(":")
                return f"{host}:{advertised['engine']}"

            manager.engine.start = start_behind_proxy
        if "side_channel" in advertised:
            open_channel = manager.open_channel

            def open_behind_proxy() -> int:
                open_channel()
                return int(advertised["side_channel"])

            manager.open_channel = open_behind_proxy

    def aim(self, number: int, pid: int, path: str) -> None:
        """Has the next pull send a signal to a process while it is under way.

        Args:
            number: The signal.
            pid: Whose.
            path: Gets the time, and whether the pull had ended already.
        """
        self._hook.target = (number, pid, path)

    def leg(self, room: int) -> dict[str, Any]:
        leg = self._legs[room]
        failure = leg.failure
        return {
            "state": leg.poll().name,
            "reason": failure.reason if failure else "",
            "status": failure.status if failure else 0,
            "opened": leg.timing.opened,
            "finished": leg.timing.finished,
        }

    def arrived(self, room: int) -> bool:
        """Whether pages were pulled and wait for `commit`."""
        manager: Any = self._manager
        manager.loop.call(lambda: None)  # A chunk that is being looked at has become a pull.
        leg = self._legs[room]
        return leg.poll() is KVPoll.Transferring and not manager.counters()["pending_pulls"]

    def digest(self, pages: list[int]) -> str:
        """Returns a digest of the content of pages."""
        total = hashlib.sha256()
        for part in self._pool.pages(pages):
            total.update(part.tobytes())
        return total.hexdigest()


if __name__ == "__main__":
    del create_manager, pairs  # Imported only so that a spare process has them ready.
    main(_Member)
