# SPDX-License-Identifier: Apache-2.0
"""A bootstrap server of its own: prefill servers wait for it, outlive it, and come back to it."""

import concurrent.futures
import pathlib
import sys

import pytest
import zmq

from kvferry.control.messages import Register, Registered, Withdraw
from kvferry.control.wire import decode, encode
from kvferry.demo.ports import PortPicker
from kvferry.demo.processes import Processes, answers_200
from kvferry.demo.stack import Server, Stack, get_json
from kvferry.tests.control.room_registry_test import instance
from kvferry.tests.e2e.serving import TINY_FLAGS, generate, wait_at_rest, wait_for

_PORT_FLAG = "--bootstrap_port"


def _ready(server: Server) -> bool:
    return answers_200(f"{server.url}/health")


def _reason(server: Server) -> str:
    try:
        get_json(f"{server.url}/health")
    except ConnectionError as error:
        return str(error)
    return ""


def _meeting(port: int, room: int) -> dict[str, object]:
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}


def test_prefill_servers_wait_for_it_and_come_back_to_it(tiny_model: pathlib.Path) -> None:
    flags = {"prefill": (*TINY_FLAGS, "--bootstrap_host=localhost"), "decode": TINY_FLAGS}
    with Stack(tiny_model, flags=flags, prefills=0, decodes=0, router=None) as stack:
        first = stack.start_server("prefill", wait=False)
        port = first.bootstrap_port
        second = stack.start_server("prefill", f"{_PORT_FLAG}={port}", wait=False)
        decode = stack.start_server("decode")
        missing = f"not registered with the bootstrap server localhost:{port}"
        wait_for(lambda: missing in _reason(first), "the reason", 60.0)
        assert answers_200(f"{first.url}/livez")

        command = [sys.executable, "-m", "kvferry.control.bootstrap_main", f"{_PORT_FLAG}={port}"]
        log = "bootstrap server ready"
        bootstrap = stack.processes.start("bootstrap", command, lambda: log in bootstrap.log_tail())
        wait_for(lambda: _ready(first) and _ready(second), "both registered", 60.0)
        for room, server in enumerate((first, second, second, first)):
            _ask(server, decode, _meeting(port, room))

        bootstrap.kill()
        wait_for(lambda: missing in _reason(first) and missing in _reason(second), "noticed")
        assert answers_200(f"{first.url}/livez")
        stack.processes.restart(bootstrap)
        wait_for(lambda: _ready(first) and _ready(second), "both back")
        for room, server in enumerate((second, first), 10):
            _ask(server, decode, _meeting(port, room))
        wait_at_rest(first, second, decode)


def _ask(prefill: Server, decode: Server, meeting: dict[str, object]) -> None:
    """Posts to both as a router does; the answer must be a 200."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        other = threads.submit(generate, prefill.url, [5, 6, 7], 3, **meeting)
        assert len(generate(decode.url, [5, 6, 7], 3, **meeting)["output_ids"]) == 3
        other.result()


def _lease_seconds(port: int) -> float:
    """Registers with a bootstrap server and withdraws; returns how long it would have lasted."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 200)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(encode(Register(instance=instance("guest", port=1))))
        answer = decode(dealer.recv())
        dealer.send(encode(Withdraw(instance_id="guest", generation=1)))
    assert isinstance(answer, Registered), answer
    return answer.lease_seconds


def test_who_is_silent_for_the_peer_timeout_is_dropped(pair: Stack) -> None:
    assert "--peer_timeout_seconds=1.5" in TINY_FLAGS
    assert _lease_seconds(pair.prefills[0].bootstrap_port) == 1.5


@pytest.mark.parametrize(("flags", "seconds"), [([], 3.0), (["--peer_timeout_seconds=7"], 7.0)])
def test_its_peer_timeout_is_a_flag(flags: list[str], seconds: float) -> None:
    port = PortPicker().pick()
    command = [sys.executable, "-m", "kvferry.control.bootstrap_main", f"{_PORT_FLAG}={port}"]
    with Processes() as processes:
        log = "bootstrap server ready"
        child = processes.start("bootstrap", [*command, *flags], lambda: log in child.log_tail())
        assert _lease_seconds(port) == seconds
