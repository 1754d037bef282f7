# SPDX-License-Identifier: Apache-2.0
"""A prefill server, a decode server and the router on this machine, as child processes.

    with Stack(default_model_path(), router="rust") as stack:
        ask(stack.router_url, ...)

Everything listens on free ports of a loopback address.
"""

import dataclasses
import http.client
import json
import pathlib
import sys
import types
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from kvferry.demo.ports import LOOPBACK, PortPicker, http_url, url_host
from kvferry.demo.processes import Child, Processes, answers_200

Role = Literal["prefill", "decode", "null"]
RouterMode = Literal["rust", "mini-lb"]

# Compiling every step of a 135 M model takes under a minute on two cores; leave room for less.
START_TIMEOUT_SECONDS = 600.0
_ROUTER_TIMEOUT_SECONDS = 60.0
_REQUEST_TIMEOUT_SECONDS = 10.0
_MAINS: Mapping[Role, str] = types.MappingProxyType(
    {
        "prefill": "kvferry.control.prefill_main",
        "decode": "kvferry.control.decode_main",
        "null": "kvferry.control.prefill_main",
    }
)


def main_command(role: Role) -> list[str]:
    """Names the program of a role.

    Args:
      role: "prefill", "decode" or "null" (both in one process).

    Returns:
      The command, without flags.
    """
    return [sys.executable, "-m", _MAINS[role]]


def get_json(url: str) -> Any:
    """Asks a server for a JSON document.

    Args:
      url: an http:// address.

    Returns:
      The document.

    Raises:
      ConnectionError: no answer, a status other than 200, or no JSON.
    """
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_REQUEST_TIMEOUT_SECONDS)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise ConnectionError(f"GET {url} answered {answer.status}: {body[:200]!r}")
        return json.loads(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"GET {url} failed: {error}") from error
    finally:
        connection.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A prefill, decode or colocated server.

    Attributes:
      role: what it does.
      url: its HTTP address, without a trailing slash.
      port: of `url`.
      bootstrap_port: where it (prefill) registers, or whom it (decode) asks by default.
      process: for signals, its log, its end.
    """

    role: Role
    url: str
    port: int
    bootstrap_port: int
    process: Child


class Stack:
    """Starts servers and a router, and ends them.

    Attributes:
      prefills: the prefill servers, in order.
      decodes: the decode servers, in order.
      colocated: servers that do both, if `start_server` started any.
      router: the router's process, or None.
      processes: the children's owner.
    """

    def __init__(
        self,
        model_path: pathlib.Path | str,
        *,
        prefills: int = 1,
        decodes: int = 1,
        router: RouterMode | None = "rust",
        flags: Mapping[str, Sequence[str]] | None = None,
        processes: Processes | None = None,
        command: Callable[[Role], Sequence[str]] = main_command,
        host: str = LOOPBACK,
    ) -> None:
        """Describes a stack; `start` (or `with`) starts it.

        Args:
          model_path: what each server loads.
          prefills: how many prefill servers; may be 0.
          decodes: how many decode servers; may be 0.
          router: which of sglang_router's two routers to put in front, or None.
          flags: more command-line arguments by role: "prefill", "decode", "null" or "router".
          processes: the owner of the children, which says where logs and progress go; None: a new
            one that shows nothing.
          command: the program that serves a role.
          host: the loopback address that everything listens on: "127.0.0.1" or "::1".

        Raises:
          ValueError: a router without a prefill and a decode server, or flags for a role that does
            not exist.
        """
        unknown = set(flags or ()) - {*_MAINS, "router"}
        if unknown:
            raise ValueError(f"No such role in flags: {', '.join(sorted(unknown))}.")
        if router is not None and not (prefills and decodes):
            raise ValueError(
                f"A router needs a prefill and a decode server, got {prefills} and {decodes}."
            )
        self.processes = processes or Processes()
        self.prefills: list[Server] = []
        self.decodes: list[Server] = []
        self.colocated: list[Server] = []
        self.router: Child | None = None
        self._counts = (prefills, decodes)
        self._router_mode = router
        self._router_url: str | None = None
        self._model_path = str(model_path)
        self._flags = dict(flags or {})
        self._command = command
        self._host = host
        self._ports = PortPicker(host)

    @property
    def prefill_urls(self) -> list[str]:
        """Addresses of the prefill servers."""
        return [server.url for server in self.prefills]

    @property
    def decode_urls(self) -> list[str]:
        """Addresses of the decode servers."""
        return [server.url for server in self.decodes]

    @property
    def router_url(self) -> str:
        """Address of the router.

        Raises:
          RuntimeError: there is none.
        """
        if self._router_url is None:
            raise RuntimeError("This stack has no router, or it is not started.")
        return self._router_url

    def start(self) -> Self:
        """Starts everything and waits until it is ready.

        Returns:
          This stack.

        Raises:
          ProcessError: something ended, or was not ready in time; nothing is left running.
        """
        prefills, decodes = self._counts
        try:
            self.prefills = [self._launch("prefill", f"prefill{n}") for n in range(prefills)]
            self.decodes = [self._launch("decode", f"decode{n}") for n in range(decodes)]
            self.wait_ready()
            if self._router_mode is not None:
                self._start_router(self._router_mode)
        except BaseException:
            self.stop()
            raise
        return self

    def start_server(self, role: Role, *more_flags: str, wait: bool = True) -> Server:
        """Starts one more server; the router is not told.

        Args:
          role: what it does.
          *more_flags: further command-line arguments, after those of its role.
          wait: whether to wait until it is ready.

        Returns:
          The server, which also joins `prefills`, `decodes` or `colocated`.

        Raises:
          ProcessError: it ended, or was not ready in time.
        """
        groups = {"prefill": self.prefills, "decode": self.decodes, "null": self.colocated}
        group = groups[role]
        name = f"{'colocated' if role == 'null' else role}{len(group)}"
        server = self._launch(role, name, more_flags)
        group.append(server)
        if wait:
            self.wait_ready([server])
        return server

    def wait_ready(self, servers: Iterable[Server] | None = None) -> None:
        """Waits until servers answer /health.

        Args:
          servers: which; None: all prefill and decode servers.

        Raises:
          ProcessError: one ended, or was not ready in time.
        """
        chosen = [*self.prefills, *self.decodes] if servers is None else servers
        self.processes.wait_ready((s.process for s in chosen), START_TIMEOUT_SECONDS)

    def stop(self) -> None:
        """Ends every process; may be called twice."""
        self.processes.stop()

    def __enter__(self) -> Self:
        """Starts everything."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """Ends every process; after an error the logs stay."""
        self.processes.__exit__(kind, error, trace)

    def _launch(self, role: Role, name: str, more_flags: Sequence[str] = ()) -> Server:
        port = self._ports.pick()
        # A decode server is told the first prefill server's port, for routers that name none.
        is_peer = role == "decode" and self.prefills
        bootstrap = self.prefills[0].bootstrap_port if is_peer else self._ports.pick()
        values = {
            "model_path": self._model_path,
            "host": self._host,
            "port": port,
            "bootstrap_port": bootstrap,
            "side_channel_port": self._ports.pick(),
            "kv_transfer_port": self._ports.pick(),
            "disaggregation_mode": role,
        }
        flags = [f"--{key}={value}" for key, value in values.items()]
        url = http_url(self._host, port)
        command = [*self._command(role), *flags, *self._flags.get(role, ()), *more_flags]
        child = self.processes.start(name, command, f"{url}/health")
        return Server(role=role, url=url, port=port, bootstrap_port=bootstrap, process=child)

    def _start_router(self, mode: RouterMode) -> None:
        port = self._ports.pick()
        url = http_url(self._host, port)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for server in self.prefills:
            command += ["--prefill", server.url, str(server.bootstrap_port)]
        for server in self.decodes:
            command += ["--decode", server.url]
        if mode == "mini-lb":
            command += ["--host", self._host, "--port", str(port), "--mini-lb"]
        else:
            command += ["--host", url_host(self._host), "--port", str(port)]
            # The metrics listener is always on, and a port that is taken ends the router. Without
            # the breaker a restarted server is used again as soon as it is healthy.
            command += ["--prometheus-host", self._host]
            command += ["--prometheus-port", str(self._ports.pick())]
            command += ["--disable-circuit-breaker", "--policy", "round_robin"]
        command += self._flags.get("router", ())
        workers = len(self.prefills) + len(self.decodes)

        def is_ready() -> bool:
            if mode == "mini-lb":
                return answers_200(f"{url}/health")
            return _count_healthy(url) >= workers

        self.router = self.processes.start("router", command, is_ready)
        running = [server.process for server in (*self.prefills, *self.decodes)]
        self.processes.wait_ready([*running, self.router], _ROUTER_TIMEOUT_SECONDS)
        self._router_url = url


def _count_healthy(router_url: str) -> int:
    """Counts the workers that the Rust router sends traffic to; its /readiness wants two only."""
    try:
        workers = get_json(f"{router_url}/workers")["workers"]
        return sum(1 for worker in workers if worker["is_healthy"])
    except (ConnectionError, KeyError, TypeError):
        return 0
