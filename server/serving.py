# SPDX-License-Identifier: Apache-2.0
"""Runs the HTTP server in the main thread, from an early claim of the port to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
from absl import logging
from fastapi import FastAPI

from kvferry.server.service import Service

# Longer than the 90 to 100 s after which a router drops idle connections, so that it never sends a
# request on one that this side is just closing.
KEEP_ALIVE_SECONDS = 120

# Time for the last error answers to leave after the drain.
_FLUSH_SECONDS = 5

_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ListenError(OSError):
    """The address cannot be listened on. The message says why and which flag to change."""


def listen(host: str, port: int) -> socket.socket:
    """Claims an address. Called first of all, so that a taken port is reported at once.

    Args:
      host: address or name of this machine.
      port: port; 0 takes any free one (`listener.getsockname()[1]` tells which).

    Returns:
      A listening socket.

    Raises:
      ListenError: the port is taken, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ListenError(
            f"{host!r} is not an address: {error.strerror}; choose another with --host"
        ) from error
    listener = socket.socket(family, kind, protocol)
    # Without it a port stays closed for a minute after the server that used it ended.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # A bound port is free for others until somebody listens.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _listen_error(host, port, error) from error
    return listener


class HttpServer:
    """An HTTP server on a claimed address.

    On SIGTERM or SIGINT it takes no further request, lets the running ones end for
    `drain_seconds`, then answers the rest with an error, and `run` returns. A second signal cuts
    the drain short.

    Args:
      app: the application.
      service: what it serves; told when the end begins.
      listener: a listening socket, see `listen`.
      drain_seconds: how long running requests may take to end.
    """

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        listener: socket.socket,
        *,
        drain_seconds: float = 30.0,
    ):
        self._listener = listener
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            lifespan="off",
            loop="asyncio",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(drain_seconds) + _FLUSH_SECONDS,
        )
        self._server = _DrainingServer(config, service, drain_seconds)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port listened on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def running(self) -> bool:
        """Whether requests are accepted."""
        return self._server.started and not self._server.should_exit

    def run(self) -> None:
        """Serves until told to stop. Signals are handled when called in the main thread."""
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Begins the end, as SIGTERM does. Any thread; does nothing before `run` or after it."""
        self._server.request_stop()


def serve(
    app: FastAPI,
    service: Service,
    listener: socket.socket,
    *,
    drain_seconds: float = 30.0,
) -> None:
    """Serves in the calling thread until SIGTERM or SIGINT; see `HttpServer`.

    Args:
      app: the application.
      service: what it serves.
      listener: a listening socket, see `listen`.
      drain_seconds: how long running requests may take to end.
    """
    HttpServer(app, service, listener, drain_seconds=drain_seconds).run()


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that returns after a signal, instead of raising it once more."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_seconds: float,
    ):
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.request_stop()

    def request_stop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        if self._stopping:
            logging.warning("second request to stop: ending %s", self._abort_rest())
            return
        self._stopping = True
        logging.info("stopping: running requests have %g s to end", self._drain_seconds)
        self._service.set_not_ready("shutting down")
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_seconds, self._abort_rest)

    def _abort_rest(self) -> str:
        return f"{self._service.abort_all('the server is shutting down')} running requests"


def _listen_error(host: str, port: int, error: OSError) -> ListenError:
    if error.errno == errno.EADDRINUSE:
        return ListenError(f"port {port} on {host} is in use; choose another with --port")
    if error.errno == errno.EACCES:
        return ListenError(
            f"port {port} on {host} needs privileges; choose one above 1023 with --port"
        )
    return ListenError(
        f"cannot listen on {host}:{port}: {error.strerror}; choose an address of this machine with"
        " --host"
    )
