# SPDX-License-Identifier: Apache-2.0
"""Sends rubbish to every port of a pair of servers, again and again."""

import collections
import dataclasses
import json
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import zmq

from kvferry.control.messages import (
    CanaryDone,
    KVAbort,
    KVChunkDone,
    KVFailed,
    KVOpen,
    KVRequest,
    Lookup,
    LookupReply,
    Retract,
    Touched,
)
from kvferry.control.wire import encode

_PAUSE_SECONDS = 0.05
_TIMEOUT_SECONDS = 2.0
_ID_LIMIT = 1 << 53
_ROOM_LIMIT = 1 << 62


@dataclasses.dataclass(frozen=True)
class Targets:
    """Where rubbish goes.

    Attributes:
        http_ports: Ports that speak HTTP.
        zmq_ports: Ports that speak ZMTP.
        raw_ports: Other ports.
        unix_names: Returns the abstract Unix sockets of now ("@name"); None: there are none.
    """

    http_ports: list[int]
    zmq_ports: list[int]
    raw_ports: list[int]
    unix_names: Callable[[], list[str]] | None

    @property
    def ports(self) -> list[int]:
        """All TCP ports."""
        return [*self.http_ports, *self.zmq_ports, *self.raw_ports]


class Rubbish:
    """A thread that sends rubbish until it is stopped.

    Args:
        targets: Where to.
        seed: Of all chance.

    Attributes:
        sent: How much of what was sent.
    """

    def __init__(self, targets: Targets, seed: int) -> None:
        self._rng = random.Random(f"rubbish-{seed}")
        self._targets = targets
        self._context = zmq.Context()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rubbish")
        self.sent: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> "Rubbish":
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        kinds: list[Callable[[], None]] = [
            self._raw_bytes,
            self._open_and_close,
            self._zmq_frames,
            self._well_formed_nonsense,
            self._http_body,
        ]
        if self._targets.unix_names is not None:
            kinds.append(self._unix_packet)
        while not self._stop.wait(_PAUSE_SECONDS):
            kind = self._rng.choice(kinds)
            try:
                kind()
            except (OSError, psutil.Error):
                self.sent["refused"] += 1  # The server is being killed, or hangs up on us.
            else:
                self.sent[kind.__name__.strip("_")] += 1

    def _connect(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS)

    def _raw_bytes(self) -> None:
        starts = [b"", b"GET / HTTP/1.1\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x01NULL", b"\0" * 4]
        start = self._rng.choice(starts)
        with self._connect(self._rng.choice(self._targets.ports)) as peer:
            peer.sendall(start + self._rng.randbytes(self._rng.randrange(4096)))

    def _open_and_close(self) -> None:
        with self._connect(self._rng.choice(self._targets.ports)):
            pass

    def _unix_packet(self) -> None:
        assert self._targets.unix_names is not None
        names = self._targets.unix_names()
        if not names:
            raise ConnectionRefusedError("both servers are gone")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(_TIMEOUT_SECONDS)
            peer.connect("\0" + self._rng.choice(names)[1:])
            peer.send(self._rng.randbytes(self._rng.randrange(1, 4096)))

    def _send_frames(self, frames: list[bytes]) -> None:
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 200)
            dealer.connect(f"tcp://127.0.0.1:{self._rng.choice(self._targets.zmq_ports)}")
            dealer.send_multipart(frames)

    def _zmq_frames(self) -> None:
        rng = self._rng
        good = bytearray(encode(self._nonsense()))
        good[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        choices = [
            [rng.randbytes(rng.randrange(1, 4096))],
            [b"kvf\x01" + rng.randbytes(rng.randrange(200))],
            [b"kvf\x63" + rng.randbytes(20)],
            [bytes(good)],
            [b"", b"", b""],
            [bytes(100_000)],
        ]
        self._send_frames(rng.choice(choices))

    def _well_formed_nonsense(self) -> None:
        self._send_frames([encode(self._nonsense())])

    def _nonsense(self) -> Any:
        """A message that nobody expects: from a stranger, about what does not exist."""
        rng = self._rng
        key, room = rng.randrange(_ID_LIMIT), rng.randrange(_ROOM_LIMIT)
        return rng.choice(
            [
                KVOpen(room=room, transfer_id=key, generation=rng.randrange(1 << 30)),
                KVRequest(
                    room=room, transfer_id=key, first_page=3, num_pages=1 << 20, prompt_tokens=1
                ),
                KVAbort(room=room, transfer_id=key, reason="rubbish", status=500),
                KVChunkDone(room=room, transfer_id=key, sequence=7),
                KVFailed(transfer_id=key, reason="rubbish", status=503),
                Touched(transfer_ids=[key]),
                CanaryDone(canary_key=key),
                Retract(instance_id="nobody", rooms=[room]),
                Lookup(query=key, room=room, instance_id="nobody"),
                LookupReply(query=key, reason="rubbish"),
            ]
        )

    def _http_body(self) -> None:
        rng = self._rng
        bodies = [
            b"{",
            b"[" * 5000,
            json.dumps({"input_ids": [1, -5, 1 << 40]}).encode(),
            json.dumps({"input_ids": [5], "bootstrap_host": "127.0.0.1"}).encode(),
            json.dumps({"input_ids": [5], "bootstrap_room": -1, "bootstrap_host": 7}).encode(),
            json.dumps({"text": "x", "sampling_params": {"temperature": "hot"}}).encode(),
            rng.randbytes(500),
        ]
        body = rng.choice(bodies)
        path = rng.choice(["/generate", "/v1/chat/completions", "/v1/completions", "/nowhere"])
        length = len(body) + rng.choice([0, 0, 0, 1000])  # The rest of some never comes.
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        with self._connect(rng.choice(self._targets.http_ports)) as peer:
            peer.sendall(head.encode() + body)
            if length == len(body):
                status = peer.recv(100).split(b" ")[1:2]
                assert status and 400 <= int(status[0]) < 600, status
