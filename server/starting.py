# SPDX-License-Identifier: Apache-2.0
"""Answers while a server starts: 503 with the reason, so that nobody waits for it in the dark."""

import contextlib
import re
import socket
import threading

import msgspec

from kvferry.server.errors import UNAVAILABLE, error_object

_REQUEST_SECONDS = 1.0
_LINGER_SECONDS = 0.2
_READ_BYTES = 65536
_LIVEZ = re.compile(rb"(GET|HEAD) /livez[ ?]")


class StartingAnswers:
    """Answers requests on a listening socket until it is closed: /livez with 200, others with 503.

    One connection at a time is plenty for health checks and the odd early request. A request for
    which there is no time before the end stays in the socket's queue, for the real server.
    """

    def __init__(self, listener: socket.socket, reason: str) -> None:
        """Starts to answer.

        Args:
          listener: a listening socket; left open at the end.
          reason: what clients are told.
        """
        self.reason = reason
        self._listener = listener
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http-starting", daemon=True)
        listener.settimeout(_LINGER_SECONDS)
        self._thread.start()

    def close(self) -> None:
        """Stops answering; the socket is the caller's again. May be called twice."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._listener.settimeout(None)

    def _run(self) -> None:
        while not self._closing.is_set():
            # A client that goes away while it is answered is no reason to stop.
            with contextlib.suppress(TimeoutError, OSError):
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(_REQUEST_SECONDS)
                    request = connection.recv(_READ_BYTES)
                    connection.sendall(self._answer(request))

    def _answer(self, request: bytes) -> bytes:
        error = error_object(f"the server is not available: {self.reason}", UNAVAILABLE)
        status, body = f"{UNAVAILABLE} Service Unavailable", msgspec.json.encode({"error": error})
        if _LIVEZ.match(request):
            status, body = "200 OK", b'{"status":"starting"}'
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body
