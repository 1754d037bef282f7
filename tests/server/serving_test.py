# SPDX-License-Identifier: Apache-2.0
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvferry.server.serving import KEEP_ALIVE_SECONDS, ListenError, listen
from kvferry.tests.server.running import WAIT_SECONDS, Running, read_until

_SERVER = """
import sys
from kvferry.engine.request import FinishReason
from kvferry.server.app import create_app
from kvferry.server.interfaces import ServiceOptions
from kvferry.server.service import Service
from kvferry.server.serving import listen, serve
from kvferry.tests.server.scripted import ByteTokenizer, Piece, ScriptedScheduler

steps, drain_seconds = int(sys.argv[1]), float(sys.argv[2])

def script(request):
    for _ in range(steps):
        yield Piece(97)
    yield Piece(98, finish=FinishReason("length"))

scheduler = ScriptedScheduler(script)
scheduler.start()

class Told(Service):
    def set_not_ready(self, reason):
        super().set_not_ready(reason)
        print(reason, flush=True)

service = Told(scheduler, ByteTokenizer(), ServiceOptions(model_name="m", max_context=512))
service.set_ready()
listener = listen("127.0.0.1", 0)
print("port", listener.getsockname()[1], flush=True)
serve(create_app(service), service, listener, drain_seconds=drain_seconds)
print("stopped", scheduler.stats().live, flush=True)
scheduler.stop()
"""


@contextlib.contextmanager
def _process(steps: int, drain_seconds: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", _SERVER, str(steps), str(drain_seconds)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, JAX_PLATFORMS="cpu")
    )
    try:
        assert process.stdout is not None
        found = re.match(r"port (\d+)", process.stdout.readline())
        assert found is not None
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()


def _begin_stream(port: int) -> socket.socket:
    body = b'{"text":"abc","stream":true,"sampling_params":{"max_new_tokens":500}}'
    head = b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)
    connection.sendall(head + body)
    read_until(connection, b"data: ")
    return connection


def test_port_zero_takes_a_free_port() -> None:
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def test_a_taken_port_is_reported_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        message = f"^port {port} on 127.0.0.1 is in use; choose another with --port$"
        with pytest.raises(ListenError, match=message):
            listen("127.0.0.1", port)


def test_a_port_can_be_taken_over_after_its_server_ended() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listener.accept()
        accepted.close()
        client.close()
    with listen("127.0.0.1", port):
        pass


def test_a_foreign_address() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:0: .* with --host"):
        listen("192.0.2.1", 0)


def test_a_name_that_is_no_address() -> None:
    with pytest.raises(ListenError, match="'not an address' is not an address: .* with --host"):
        listen("not an address", 0)


def test_idle_connections_outlive_a_routers() -> None:
    assert KEEP_ALIVE_SECONDS >= 120


def test_a_connection_serves_many_requests(plain: Running) -> None:
    connection = http.client.HTTPConnection(plain.host, plain.port, timeout=WAIT_SECONDS)
    connection.connect()
    used = connection.sock
    for path in ("/health", "/nothing", "/v1/models"):
        connection.request("GET", path)
        connection.getresponse().read()
        assert connection.sock is used
    connection.close()


def test_an_http2_preface_does_no_harm(plain: Running) -> None:
    with socket.create_connection((plain.host, plain.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 4")
    assert plain.get("/health").status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end(number: signal.Signals) -> None:
    with _process(steps=400, drain_seconds=20) as (process, port):
        with _begin_stream(port) as connection:
            process.send_signal(number)
            assert process.stdout is not None
            assert process.stdout.readline() == "shutting down\n"
            rest = read_until(connection, b"[DONE]")
        assert b'"finish_reason":{"type":"length"' in rest
        assert process.stdout.readline() == "stopped 0\n"
        assert process.wait(WAIT_SECONDS) == 0


def test_requests_that_outlast_the_drain_get_an_error() -> None:
    with _process(steps=10**9, drain_seconds=0.3) as (process, port):
        with _begin_stream(port) as connection:
            process.send_signal(signal.SIGTERM)
            rest = read_until(connection, b"[DONE]")
        assert b"the server is shutting down" in rest
        assert process.wait(WAIT_SECONDS) == 0


def test_a_second_signal_cuts_the_drain_short() -> None:
    with _process(steps=10**9, drain_seconds=1000) as (process, port):
        with _begin_stream(port) as connection:
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            assert process.stdout.readline() == "shutting down\n"
            process.send_signal(signal.SIGTERM)
            rest = read_until(connection, b"[DONE]")
        assert b"the server is shutting down" in rest
        assert process.wait(WAIT_SECONDS) == 0


def test_an_idle_server_stops_at_once() -> None:
    with _process(steps=1, drain_seconds=1000) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
        connection.request("GET", "/health")
        connection.getresponse().read()  # leaves an idle connection behind
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        connection.close()
