# SPDX-License-Identifier: Apache-2.0
"""A server that starts says so."""

import http.client
import json
import socket

import pytest

from kvferry.server.serving import listen
from kvferry.server.starting import StartingAnswers


def _get(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())["error"]["message"]


def test_503_with_the_reason_until_closed() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        answers = StartingAnswers(listener, "loading the model")
        assert _get(port) == (503, "the server is not available: loading the model")
        answers.reason = "compiling 3/14"
        # Somebody who connects, says nothing and leaves does not stop it.
        socket.create_connection(("127.0.0.1", port)).close()
        assert _get(port) == (503, "the server is not available: compiling 3/14")
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")  # nobody should restart it
        answers.close()
        answers.close()
        with socket.create_connection(("127.0.0.1", port), timeout=0.3) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            with pytest.raises(TimeoutError):
                client.recv(1)  # in the queue, for the server that follows
