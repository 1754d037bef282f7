# SPDX-License-Identifier: Apache-2.0
"""How much memory a connection to a listening ZMQ socket can take.

Strangers speak ZMTP by hand here: libzmq itself would hold back what they send.
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from kvferry.control.keys import make_keys
from kvferry.control.leg import check_extra
from kvferry.control.messages import Announce, KVAccept, KVRequest, Message, Touched
from kvferry.control.security import CurveKeys
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.wire import MAX_REQUEST_BYTES, encode
from kvferry.tests.control.pairs import wait_until
from kvferry.tests.control.side_channel_test import SERVER_PROGRAM, Client, Server

_MIB = 1 << 20
_MORE, _LONG, _COMMAND = 1, 2, 4


def _frame(body: bytes, flags: int = 0) -> bytes:
    return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body


@contextlib.contextmanager
def _stranger(port: int) -> Iterator[socket.socket]:
    """A connection that has shaken hands as a DEALER without keys."""
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as made:
        made.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        made.sendall(bytes([_COMMAND, len(ready)]) + ready)
        got = b""
        while b"READY" not in got:
            got += made.recv(1000)
        yield made


@pytest.fixture(name="server")
def _server() -> Iterator[Server]:
    server = Server()
    yield server
    server.loop.stop()
    assert server.loop.failure is None


def test_a_frame_over_a_mebibyte_is_not_even_begun(server: Server) -> None:
    with _stranger(server.port) as stranger:
        stranger.sendall(_frame(encode(KVAccept(transfer_id=1))))
        wait_until(lambda: server.messages)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(bytes([_LONG]) + struct.pack(">Q", MAX_REQUEST_BYTES + 1))
            assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    "message",
    [
        Announce(instance_id="i" * 256, rooms=[(1 << 63) - 1] * 65536),
        Touched(transfer_ids=[(1 << 53) - 1] * 65536),
        KVRequest(
            room=(1 << 63) - 1,
            transfer_id=1,
            first_page=0,
            num_pages=1,
            prompt_tokens=1,
            extra={"text": "x" * (MAX_REQUEST_BYTES // 2 - 100)},
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_longest_messages_pass(server: Server, message: Message) -> None:
    if isinstance(message, KVRequest):
        check_extra(message.extra)
    client = Client(server.port)
    wait_until(lambda: client.up)
    assert client.send(message)
    wait_until(lambda: server.messages)
    assert server.messages[0][1] == message
    client.loop.stop()


def test_a_busy_server_keeps_a_bounded_number_of_messages(server: Server) -> None:
    """What it does not keep waits at the sender's end, and is not lost."""
    with _stranger(server.port) as stranger:
        free = threading.Event()
        server.loop.post(lambda: _wait(free))
        frame = _frame(encode(Touched(transfer_ids=[1] * 16_000)))
        stranger.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 128 * _MIB:
                sent += stranger.send(frame[sent % len(frame) :])
        assert sent < 1100 * len(frame) + 16 * _MIB  # And the buffers of the two sockets.
        free.set()
        wait_until(lambda: len(server.messages) == sent // len(frame))


@pytest.mark.parametrize("keys", [None, make_keys()], ids=["plain", "keys"])
def test_who_completes_messages_may_send_any_number(keys: CurveKeys | None) -> None:
    server = Server(ChannelOptions(keys=keys))
    client = Client(server.port, ChannelOptions(keys=keys))
    wait_until(lambda: client.up)
    message = Touched(transfer_ids=[1 << 52] * 50_000)
    for number in range(1, 41):  # 18 MB, and a look in between now and then.
        assert client.send(message)
        wait_until(lambda number=number: len(server.messages) == number)  # type: ignore[misc]
        time.sleep(0.01)
    assert not client.down and not server.tally.snapshot()
    for each in (client, server):
        each.loop.stop()


def _wait(event: threading.Event) -> None:
    event.wait(30.0)


_ENGINE = """
import sys
from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.registry import create_engine
engine = create_engine("zmq", EngineOptions())
print(engine.start().rpartition(":")[2], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("server", "frame_bytes"),
    [(SERVER_PROGRAM, 8), (SERVER_PROGRAM, 1000), (SERVER_PROGRAM, _MIB), (_ENGINE, 4000)],
    ids=["tiny frames", "small frames", "large frames", "zmq engine"],
)
def test_a_message_that_never_ends_ends_its_connection(server: str, frame_bytes: int) -> None:
    """And others do not notice."""
    child = subprocess.Popen(
        [sys.executable, "-c", server], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    port, process = int(child.stdout.readline()), psutil.Process(child.pid)
    before = process.memory_info().rss
    try:
        client = Client(port)
        wait_until(lambda: client.up)
        frames = _frame(os.urandom(frame_bytes), _MORE) * max(1, _MIB // frame_bytes)
        most = 0.0
        for _ in range(3):
            with _stranger(port) as stranger, pytest.raises(ConnectionError):
                for _ in range(2 << 10):
                    stranger.sendall(frames)
                    most = max(most, (process.memory_info().rss - before) / _MIB)
        assert most < 400, "at 1 GB/s, and looked at ten times a second"
        assert client.send(Touched(transfer_ids=[1])) and not client.down
        client.loop.stop()
    finally:
        child.kill()
        child.communicate()
