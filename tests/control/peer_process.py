# SPDX-License-Identifier: Apache-2.0
"""A prefill or decode manager in a process of its own, driven over its standard input.

Run as a program it reads one JSON command per line and answers with one JSON line. `PeerProcess`
is the other end of that.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from kvferry.control.kv_poll import KVPoll

PAGE_SHAPE = (16, 6, 64)


class PeerProcess:
    """Starts and drives such a process.

    Args:
        options: "role", "engine", and anything that `Peer` reads.
    """

    module = "kvferry.tests.control.peer_process"

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports: dict[str, int] = self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, command: str, **values: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **values}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer process ended with {self._process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def state(self, room: int) -> KVPoll:
        return KVPoll(self("state", room=room)["state"])

    def has_failed(self, room: int) -> bool:
        return self.state(room) is KVPoll.Failed

    def counters(self) -> dict[str, int]:
        return self("counters")

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it without a chance to say goodbye."""
        self._process.kill()
        self.close()

    def close(self) -> int:
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=20)
        return self._process.returncode


@contextlib.contextmanager
def peer_process(**options: Any) -> Iterator[PeerProcess]:
    """Runs one and ends it afterwards, killed or not."""
    peer = PeerProcess(**options)
    try:
        yield peer
    finally:
        peer.close()


class Peer:
    """The inside of the process."""

    def __init__(self, options: dict[str, Any]) -> None:
        from kvferry.control.bootstrap import ZmqBootstrapServer
        from kvferry.control.control_loop import ControlLoop
        from kvferry.control.side_channel import ChannelOptions
        from kvferry.control.zmq_connection import ControlOptions, create_manager
        from kvferry.control.zmq_prefill import PrefillManager
        from kvferry.tests.control import pairs

        role = options["role"]
        control = ControlOptions(
            **{"peer_timeout_seconds": 1.0, "orphan_timeout_seconds": 5.0}
            | options.get("control", {})
        )
        self._loop = ControlLoop()
        self._bootstrap = None
        if role == "prefill" and not control.bootstrap_port:
            timeout = ChannelOptions(peer_timeout_seconds=control.peer_timeout_seconds)
            port = options.get("bootstrap_port", 0)
            self._bootstrap = ZmqBootstrapServer(
                "127.0.0.1", port, options=timeout, loop=self._loop
            )
            self._bootstrap.start()
            control = dataclasses.replace(control, bootstrap_port=self._bootstrap.port)
        self._pool = pairs.Pool(
            options.get("num_pages", 64),
            seed=options.get("seed"),
            page_shape=tuple(options.get("page_shape", PAGE_SHAPE)),
        )
        self._manager = create_manager(
            role,
            options=control,
            layout=pairs.LAYOUT,
            pages=self._pool,
            engine=self.make_engine(options),
            on_event=lambda: None,
            loop=self._loop,
        )
        self.prepare(options)
        self._manager.start()
        self._legs: dict[int, Any] = {}
        self.ports = {"bootstrap": control.bootstrap_port}
        if isinstance(self._manager, PrefillManager):
            self.ports["side_channel"] = self._manager.instance.side_channel_port

    def make_engine(self, options: dict[str, Any]) -> Any:
        from kvferry.control.engines.base import EngineOptions
        from kvferry.control.engines.registry import create_engine

        port = options.get("engine_port", 0)
        return create_engine(options.get("engine", "jax"), EngineOptions(channels=2, port=port))

    def prepare(self, options: dict[str, Any]) -> None:
        """For derived classes: called before the manager starts."""

    def open(self, room: int, **more: Any) -> None:
        if more:
            self._legs[room] = self._manager.open_receiver(more["host"], more["port"], room)
        else:
            self._legs[room] = self._manager.open_sender(room)

    def request(self, room: int, pages: list[int], **more: Any) -> None:
        self._legs[room].request(pages, prompt_tokens=1, **more)

    def send(self, room: int, pages: list[int], last: bool) -> bool:
        from kvferry.tests.control.pairs import metadata

        taken = self._legs[room].send(pages, last=last, metadata=metadata() if last else None)
        return bool(taken)

    def commit(self, room: int) -> int:
        return int(self._legs[room].commit())

    def abort(self, room: int, reason: str) -> None:
        self._legs[room].abort(reason)

    def state(self, room: int) -> dict[str, Any]:
        leg = self._legs[room]
        return {
            "state": int(leg.poll()),
            "reason": leg.failure.reason if leg.failure else "",
            "request": getattr(leg, "request", None) is not None,
        }

    def counters(self) -> dict[str, int]:
        return self._manager.counters()

    def failure(self) -> str | None:
        return self._manager.failure

    def pages(self, pages: list[int]) -> list[str]:
        return [part.tobytes().hex() for part in self._pool.pages(pages)]

    def publish_and_release(self, count: int, num_bytes: int, delivered: bool) -> None:
        """Publishes arrays that nobody pulls, and lets go of them again."""
        import jax
        import jax.numpy as jnp

        from kvferry.control.ids import IdSource
        from kvferry.control.zmq_manager import ZmqManager

        assert isinstance(self._manager, ZmqManager)
        engine, ids, keys = self._manager.engine, IdSource(), []
        for number in range(count):
            array = jax.block_until_ready(jnp.full((num_bytes // 4,), number, jnp.float32) + 0)
            keys.append(ids.next_id())
            engine.publish(keys[-1], [array], 60.0)
        for key in keys:
            engine.release(key, delivered=delivered)

    def trimmed_rss_mib(self) -> int:
        """Resident memory without what malloc keeps for later."""
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    def cpu_seconds(self) -> float:
        return time.process_time()

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def stop(self) -> None:
        self._manager.stop()
        if self._bootstrap is not None:
            self._bootstrap.stop()
        self._loop.stop()


def main(kind: type[Peer] = Peer) -> None:
    """Serves commands until the input ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever a library prints must not get between the answers.

    def answer(**values: Any) -> None:
        output.write(json.dumps(values) + "\n")
        output.flush()

    # Without arguments the options are the first line: everything is imported by then.
    peer = kind(json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.readline()))
    answer(result=peer.ports)
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            answer(result=getattr(peer, command)(**request))
        except (RuntimeError, ValueError) as error:
            answer(error=repr(error))
    peer.stop()


if __name__ == "__main__":
    main()
