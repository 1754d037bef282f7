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
from collections.abc import Iterator

import psutil
import pytest

from kvferry.control.leg import check_extra
from kvferry.control.messages import Announce, KVAccept, KVRequest, Message, Touched
from kvferry.control.wire import MAX_REQUEST_BYTES, encode
from kvferry.tests.control.pairs import wait_until
from kvferry.tests.control.side_channel_test import Client, Server

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


def _wait(event: threading.Event) -> None:
    event.wait(30.0)


_SERVER = """
import sys
from kvferry.tests.control.side_channel_test import Server
server = Server()
print(server.port, flush=True)
sys.stdin.read()
"""


def test_a_message_that_never_ends_takes_memory_until_its_connection_does() -> None:
    """Not what is wanted, but what libzmq does; see docs/security.md. Others do not notice."""
    child = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    port, process = int(child.stdout.readline()), psutil.Process(child.pid)

    def grown() -> float:
        return (process.memory_info().rss - before) / _MIB

    try:
        with _stranger(port) as stranger:
            before = process.memory_info().rss
            for _ in range(80):
                stranger.sendall(_frame(os.urandom(_MIB), _MORE))
            wait_until(lambda: grown() > 64)
            assert grown() < 120
            client = Client(port)
            wait_until(lambda: client.up)
        wait_until(lambda: grown() < 16)
        assert not client.down
        client.loop.stop()
    finally:
        child.kill()
        child.communicate()
