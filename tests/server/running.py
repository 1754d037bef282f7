# SPDX-License-Identifier: Apache-2.0
"""Real servers on loopback ports, and a small HTTP client, for the tests of this room."""

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvferry.server.app import create_app
from kvferry.server.interfaces import EngineScheduler, ServiceOptions, TextTokenizer
from kvferry.server.service import Service, ServiceHooks
from kvferry.server.serving import HttpServer, listen
from kvferry.tests.server.scripted import MAX_CONTEXT, ByteTokenizer, ScriptedScheduler

WAIT_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The message of an error."""
        text = self.json["error"]["message"]
        assert isinstance(text, str)
        return text

    @property
    def events(self) -> list[Any]:
        """The events of a stream; checks the framing and the end mark."""
        assert self.headers["content-type"].startswith("text/event-stream")
        assert self.body.endswith(b"\n\n")
        blocks = self.body.decode().removesuffix("\n\n").split("\n\n")
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        assert blocks[-1] == "data: [DONE]"
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that runs, and its insides."""

    host: str
    port: int
    service: Service
    server: HttpServer

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Posts bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, headers)

    def request(
        self, method: str, path: str, raw: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_SECONDS)
        try:
            connection.request(
                method, path, raw, {"Content-Type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            fields = {key.lower(): value for key, value in response.getheaders()}
            return Answer(response.status, fields, response.read())
        finally:
            connection.close()

    @contextlib.contextmanager
    def raw_post(self, path: str, body: Any) -> Iterator[socket.socket]:
        """Sends a request on a plain socket and leaves the answer to the caller."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        with socket.create_connection((self.host, self.port), timeout=WAIT_SECONDS) as connection:
            connection.sendall(head.encode() + raw)
            yield connection


@contextlib.contextmanager
def serving(
    scheduler: EngineScheduler,
    tokenizer: TextTokenizer,
    options: ServiceOptions,
    hooks: ServiceHooks | None = None,
) -> Iterator[Running]:
    """Serves a scheduler that already runs, on a free port."""
    service = Service(scheduler, tokenizer, options, hooks)
    service.set_ready()
    listener = listen("127.0.0.1", 0)
    server = HttpServer(create_app(service), service, listener, drain_seconds=2)
    host, port = server.address
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    try:
        yield Running(host, port, service, server)
    finally:
        wait_until(lambda: server.running or not thread.is_alive(), "the server runs")
        server.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def serving_script(
    scheduler: ScriptedScheduler, hooks: ServiceHooks | None = None, **options: Any
) -> Iterator[Running]:
    """Starts a scripted scheduler and serves it."""
    scheduler.start()
    try:
        names = ServiceOptions(model_name="scripted", max_context=MAX_CONTEXT, **options)
        with serving(scheduler, ByteTokenizer(), names, hooks) as running:
            yield running
    finally:
        scheduler.stop()


END_OF_CHUNKS = b"\r\n0\r\n\r\n"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition, within a bound."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_SECONDS} s in vain until {what}"
        time.sleep(0.005)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Reads from a socket until a mark has come."""
    seen = bytearray()
    while mark not in seen[-len(mark) - 65536 :]:
        part = connection.recv(65536)
        assert part, f"the connection ended before {mark!r}; it brought {len(seen)} bytes"
        seen += part
    return bytes(seen)
