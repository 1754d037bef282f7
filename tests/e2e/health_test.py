# SPDX-License-Identifier: Apache-2.0
"""/health, /livez and /metrics of real servers, and when something has broken."""

import concurrent.futures
import itertools
import pathlib
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvferry.demo.stack import Role, Server, Stack
from kvferry.tests.e2e import breakable_server
from kvferry.tests.e2e.serving import TINY_FLAGS, by_role, post, state, wait_at_rest, wait_for

_RED_SECONDS = 2.0
_ROOMS = itertools.count(1)


def _command(role: Role) -> list[str]:
    return [sys.executable, "-m", breakable_server.__name__, role]


@pytest.fixture(name="stack")
def _stack(tiny_model: pathlib.Path) -> Iterator[Stack]:
    with Stack(tiny_model, flags=by_role(TINY_FLAGS), router=None, command=_command) as stack:
        yield stack


def _status(server: Server, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{server.url}{path}", timeout=10.0) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _both_halves(stack: Stack) -> list[int]:
    """Posts a request to both servers as a router would; returns both statuses."""
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": stack.prefills[0].bootstrap_port,
        "bootstrap_room": next(_ROOMS),
    }
    urls = [*stack.prefill_urls, *stack.decode_urls]
    with concurrent.futures.ThreadPoolExecutor(len(urls)) as threads:
        return [status for status, _ in threads.map(lambda url: post(url, "/generate", body), urls)]


def _turns_red(server: Server, reason: str) -> None:
    for path in ("/livez", "/health"):
        wait_for(lambda path=path: _status(server, path)[0] == 503, path, _RED_SECONDS)  # type: ignore[misc]
        assert reason in _status(server, path)[1]


def _is_green(server: Server) -> None:
    assert [_status(server, path)[0] for path in ("/livez", "/health")] == [200, 200]


@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_a_dead_control_thread_shows(stack: Stack, broken: str) -> None:
    servers = {"prefill": stack.prefills[0], "decode": stack.decodes[0]}
    assert _both_halves(stack) == [200, 200]
    server, other = servers.pop(broken), *servers.values()
    _is_green(server)
    server.process.signal(signal.SIGUSR1)
    _turns_red(server, "the control thread died: KeyError('a bug')")
    assert server.process.running  # It says so for a supervisor to see, and does not just end.
    assert set(_both_halves(stack)) == {503}
    _is_green(other)


@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_a_pool_whose_books_do_not_balance_shows(stack: Stack, broken: str) -> None:
    servers = {"prefill": stack.prefills[0], "decode": stack.decodes[0]}
    server, other = servers.pop(broken), *servers.values()
    assert _both_halves(stack) == [200, 200]
    wait_at_rest(server)
    server.process.signal(signal.SIGUSR2)
    wait_for(lambda: not _balanced(server), "a page is lost")
    _is_green(server)  # It is noticed when the next request has ended.
    assert _both_halves(stack) == [200, 200]
    _turns_red(server, "1 pages are in use, 0 have an owner")
    _is_green(other)


def _balanced(server: Server) -> bool:
    return bool(state(server)["kv_pages_used"] == 0)


def test_metrics_show_both_halves_and_the_bootstrap_server(stack: Stack) -> None:
    assert _both_halves(stack) == [200, 200]
    shown = []
    for server in (*stack.prefills, *stack.decodes):
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
            shown.append(dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#")))
    prefill, decode = shown
    assert float(prefill["kvferry_transfers_ok"]) == float(decode["kvferry_transfers_ok"]) == 1
    assert float(prefill["kvferry_bootstrap_instances"]) == 1
    assert "kvferry_bootstrap_instances" not in decode
