# SPDX-License-Identifier: Apache-2.0
"""Clients that leave and servers that die: only what was bound to them fails, nothing is kept."""

import concurrent.futures
import json
import pathlib
import signal
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from kvferry.demo.stack import Stack
from kvferry.tests.e2e.serving import (
    TINY_FLAGS,
    by_role,
    generate,
    post,
    state,
    wait_at_rest,
    wait_for,
)

_IDS = [5, 6, 7, 8]
_LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
_BOUND_SECONDS = 10.0
_IDLE_SECONDS = 4.0
_IDLE_SHARE = 0.02


def _meeting(stack: Stack, room: int) -> dict[str, Any]:
    port = stack.prefills[0].bootstrap_port
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}


def _open(url: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns the connection, its answer unread."""
    parts = urllib.parse.urlsplit(url)
    data = json.dumps(body).encode()
    head = (
        "POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((parts.hostname, parts.port), timeout=_BOUND_SECONDS)
    connection.sendall(head.encode() + data)
    return connection


class TestClientLeaves:
    def test_in_the_middle_of_a_stream(self, pair: Stack) -> None:
        body = {"input_ids": _IDS, "sampling_params": _LONG, "stream": True}
        with _open(pair.router_url, body) as connection:
            assert connection.recv(100)
        wait_at_rest(*pair.prefills, *pair.decodes)

    def test_while_only_the_decode_server_knows_the_room(self, pair: Stack) -> None:
        decode = pair.decodes[0]
        with _open(decode.url, {"input_ids": _IDS, **_meeting(pair, 1001)}):
            wait_for(lambda: state(decode)["kv_pages_used"] > 0, "pages reserved")
        wait_at_rest(*pair.prefills, *pair.decodes)

    def test_while_only_the_prefill_server_knows_the_room(self, pair: Stack) -> None:
        prefill = pair.prefills[0]
        with _open(prefill.url, {"input_ids": _IDS, **_meeting(pair, 1002)}):
            wait_for(lambda: state(prefill)["control"]["open_rooms"] > 0, "room open")
        wait_at_rest(*pair.prefills, *pair.decodes)

    def test_the_other_server_hears_of_it_at_once(self, pair: Stack) -> None:
        """The prefill leg is given up before the decode leg comes: it fails without waiting."""
        with _open(pair.prefill_urls[0], {"input_ids": _IDS, **_meeting(pair, 1003)}):
            prefill = pair.prefills[0]
            wait_for(lambda: state(prefill)["control"]["open_rooms"] > 0, "room open")
        wait_at_rest(prefill)
        started = time.monotonic()
        body = {"input_ids": _IDS, **_meeting(pair, 1003)}
        status, answer = post(pair.decode_urls[0], "/generate", body)
        assert time.monotonic() - started < 1.0
        assert status in (400, 503), answer

    def test_abort_request_ends_both_legs(self, pair: Stack) -> None:
        body = {"input_ids": _IDS, "sampling_params": _LONG, "rid": "to-abort"}
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            running = threads.submit(post, pair.router_url, "/generate", body)
            decode = pair.decodes[0]
            wait_for(lambda: state(decode)["num_running_reqs"] > 0, "request runs")
            for url in (*pair.prefill_urls, *pair.decode_urls):
                post(url, "/abort_request", {"rid": "to-abort"})
            status, answer = running.result(timeout=_BOUND_SECONDS)
        assert status == 400
        assert "abort" in json.dumps(answer)


@pytest.fixture(name="stack", scope="module")
def _stack(tiny_model: pathlib.Path) -> Iterator[Stack]:
    """A pair of its own for the tests that kill it."""
    flags = {**by_role(TINY_FLAGS), "router": ("--health-check-interval-secs", "1")}
    with Stack(tiny_model, flags=flags) as stack:
        yield stack


class TestServersDie:
    def _serves_again(self, stack: Stack) -> None:
        def works() -> bool:
            body = {"input_ids": _IDS, "sampling_params": {"max_new_tokens": 2}}
            return post(stack.router_url, "/generate", body)[0] == 200

        wait_for(works, "served through the router again", seconds=60)
        wait_at_rest(*stack.prefills, *stack.decodes)

    def test_prefill_dies_while_decode_waits_for_it(self, stack: Stack) -> None:
        prefill, decode = stack.prefills[0], stack.decodes[0]
        generate(stack.router_url, _IDS, 2)  # now they know each other
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            body = {"input_ids": _IDS, **_meeting(stack, 2001)}
            waiting = threads.submit(post, decode.url, "/generate", body)
            wait_for(lambda: state(decode)["kv_pages_used"] > 0, "pages reserved")
            prefill.process.kill()
            status, answer = waiting.result(timeout=_BOUND_SECONDS)
        assert status == 503, answer
        wait_at_rest(decode)
        stack.processes.restart(prefill.process)
        stack.wait_ready([prefill])
        self._serves_again(stack)

    def test_decode_dies_in_the_middle_of_an_answer(self, stack: Stack) -> None:
        decode = stack.decodes[0]
        body = {"input_ids": _IDS, "sampling_params": _LONG, "stream": True}
        with _open(stack.router_url, body) as connection:
            assert connection.recv(100)
            decode.process.kill()
            while connection.recv(65536):
                pass
        wait_at_rest(*stack.prefills)
        stack.processes.restart(decode.process)
        stack.wait_ready([decode])
        self._serves_again(stack)

    def test_a_stopped_prefill_server_is_noticed(self, stack: Stack) -> None:
        prefill, decode = stack.prefills[0], stack.decodes[0]
        generate(stack.router_url, _IDS, 2)
        prefill.process.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            body = {"input_ids": _IDS, **_meeting(stack, 2003)}
            status, _ = post(decode.url, "/generate", body)
            assert status == 503
            assert time.monotonic() - started < _BOUND_SECONDS
        finally:
            prefill.process.signal(signal.SIGCONT)
        self._serves_again(stack)

    def test_sigterm_lets_a_running_answer_end(self, stack: Stack) -> None:
        decode = stack.decodes[0]
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            body = {"input_ids": _IDS, "sampling_params": _LONG}
            running = threads.submit(post, stack.router_url, "/generate", body)
            wait_for(lambda: state(decode)["num_running_reqs"] > 0, "request runs")
            decode.process.signal(signal.SIGTERM)
            status, answer = running.result(timeout=60)
        assert status == 200
        assert len(answer["output_ids"]) == _LONG["max_new_tokens"]
        assert decode.process.wait(_BOUND_SECONDS) == 0
        stack.processes.restart(decode.process)
        stack.wait_ready([decode])
        self._serves_again(stack)


def test_idle_servers_sleep(pair: Stack) -> None:
    """An idle server that polls or spins would show here (scenario: 99 % of a core)."""
    generate(pair.router_url, _IDS, 2)
    wait_at_rest(*pair.prefills, *pair.decodes)
    servers = [*pair.prefills, *pair.decodes]
    busy = [psutil.Process(server.process.pid).cpu_times() for server in servers]
    # Not a wait for something: the interval over which the processor time is taken.
    time.sleep(_IDLE_SECONDS)
    for server, before in zip(servers, busy, strict=True):
        after = psutil.Process(server.process.pid).cpu_times()
        spent = after.user + after.system - before.user - before.system
        assert spent / _IDLE_SECONDS < _IDLE_SHARE, server.url
