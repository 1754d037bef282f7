# SPDX-License-Identifier: Apache-2.0
"""Servers with keys, on IPv6: whole processes on ::1, behind the router and without it."""

import concurrent.futures
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.control.keys import make_keys, write_keys
from kvferry.demo.ports import PortPicker
from kvferry.demo.processes import Processes
from kvferry.demo.stack import Server, Stack
from kvferry.tests.e2e.serving import (
    TINY_FLAGS,
    by_role,
    generate,
    post,
    state,
    wait_at_rest,
    wait_for,
)

_IDS = [3, 1, 4, 1, 5, 9]
_ROOMS = itertools.count(4000)


@pytest.fixture(name="key_flag", scope="module")
def _key_flag(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--curve_key_file={write_keys(tmp_path_factory.mktemp('keys'), make_keys())}"


@pytest.fixture(name="keyed", scope="module")
def _keyed(tiny_model: pathlib.Path, key_flag: str) -> Iterator[Stack]:
    with Stack(tiny_model, flags=by_role((*TINY_FLAGS, key_flag)), host="::1") as stack:
        yield stack
        wait_at_rest(*stack.prefills, *stack.decodes)


def _body(prefill: Server, host: str, port: int | None = None) -> dict[str, Any]:
    return {
        "input_ids": _IDS,
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
        "bootstrap_host": host,
        "bootstrap_port": port or prefill.bootstrap_port,
        "bootstrap_room": next(_ROOMS),
    }


def _both_legs(prefill: Server, decode: Server, host: str, port: int | None = None) -> Any:
    """Posts one request to both servers, as a router does; returns each one's status and answer."""
    body = _body(prefill, host, port)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        urls = (prefill.url, decode.url)
        return list(threads.map(lambda url: post(url, "/generate", body), urls))


def test_the_router_reaches_a_pair_with_keys_on_ipv6(keyed: Stack) -> None:
    assert keyed.router_url.startswith("http://[::1]:")
    answer = generate(keyed.router_url, _IDS, 5)
    assert len(answer["output_ids"]) == 5
    assert state(keyed.decodes[0])["transfers_ok"] >= 1


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0:0:0:0:0:0:1", "localhost"])
def test_a_request_names_the_bootstrap_server_in_any_form(keyed: Stack, host: str) -> None:
    """A localhost is 127.0.0.1 first: nobody listens there, and the next address is tried."""
    (p_status, _), (d_status, answer) = _both_legs(keyed.prefills[0], keyed.decodes[0], host)
    assert (p_status, d_status) == (200, 200), answer
    assert answer["output_ids"] == generate(keyed.router_url, _IDS, 5)["output_ids"]


def test_a_decode_server_with_other_keys_is_refused_and_both_say_so(
    keyed: Stack, tmp_path: pathlib.Path
) -> None:
    others = f"--curve_key_file={write_keys(tmp_path, make_keys())}"
    prefill, stranger = keyed.prefills[0], keyed.start_server("decode", others)
    try:
        status, answer = post(stranger.url, "/generate", _body(prefill, "::1"))
        assert status == 503
        assert f"bootstrap server [::1]:{prefill.bootstrap_port} cannot be asked" in str(answer)
        assert "needs the --curve_key_file of this process" in str(answer)
        wait_for(
            lambda: "refused a peer that does not greet" in prefill.process.log_tail(1 << 20),
            "the prefill server's warning",
        )
    finally:
        stranger.process.kill()
        keyed.decodes.remove(stranger)
    assert generate(keyed.router_url, _IDS, 5)  # The others go on.


@pytest.mark.slow
def test_tcp_engine_and_separate_bootstrap_server_on_ipv6(
    tiny_model: pathlib.Path, key_flag: str
) -> None:
    port = PortPicker("::1").pick()
    common = (*TINY_FLAGS, key_flag, "--transfer_engine=tcp", f"--bootstrap_port={port}")
    flags = {"prefill": (*common, "--bootstrap_host=localhost"), "decode": common}
    main = [sys.executable, "-m", "kvferry.control.bootstrap_main", key_flag]
    with Processes() as processes:
        stack = Stack(
            tiny_model, prefills=2, router=None, flags=flags, processes=processes, host="::1"
        )
        bootstrap = processes.start(
            "bootstrap", [*main, "--host=::1", f"--bootstrap_port={port}"], lambda: True
        )
        stack.start()
        stack.wait_ready()
        assert f"ready on [::1]:{port}" in bootstrap.log_tail()
        for prefill in stack.prefills:
            for host in ("::1", "localhost"):
                (p_status, _), (d_status, answer) = _both_legs(
                    prefill, stack.decodes[0], host, port
                )
                assert (p_status, d_status) == (200, 200), answer
        wait_at_rest(*stack.prefills, *stack.decodes)
