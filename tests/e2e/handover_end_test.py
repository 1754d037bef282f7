# SPDX-License-Identifier: Apache-2.0
"""How a hand-over between real servers ends early: in each state, by whoever may end it.

One half is a real server, the other is played by the test, so that it stands still where it should.
"""

import concurrent.futures
import http.client
import json
import pathlib
import signal
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.control.connection import KVReceiver, KVSender
from kvferry.control.kv_poll import KVPoll
from kvferry.demo.stack import Server, Stack
from kvferry.tests.control.pairs import commit_all, fails, metadata, reaches, wait_until
from kvferry.tests.e2e.counterpart import Counterpart, counterpart
from kvferry.tests.e2e.serving import TINY_FLAGS, at_rest, by_role, post, state, wait_for

_AT_ONCE = 2.0  # A second, and one for a busy machine.
_DRAIN_SECONDS = 3.0
_PROMPT = list(range(5, 45))
_FLAGS = (*TINY_FLAGS, "--transfer_engine=tcp", f"--drain_seconds={_DRAIN_SECONDS}")


class _Asked:
    """A request on its way: its answer, or the end of its client."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.body = body
        self.answer: tuple[int, Any] | None = None
        self._connection = http.client.HTTPConnection(
            urllib.parse.urlsplit(server.url).netloc, timeout=30.0
        )
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/generate", json.dumps(body), headers)
        self._socket: socket.socket = self._connection.sock
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            answer = self._connection.getresponse()
            self.answer = answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            self.answer = None  # The client has left.
        finally:
            self._connection.close()

    def leave(self) -> None:
        """The client goes away."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def status(self, seconds: float) -> int:
        """Waits for the answer; returns its status."""
        self._thread.join(seconds)
        assert self.answer is not None, f"no answer within {seconds} s"
        return self.answer[0]


@pytest.fixture(name="stack", scope="module")
def _stack(tiny_model: pathlib.Path) -> Iterator[Stack]:
    with Stack(tiny_model, flags=by_role(_FLAGS), router=None) as stack:
        yield stack


@pytest.fixture(name="as_decode")
def _as_decode(stack: Stack) -> Iterator[Counterpart]:
    """The test plays the decode server of a real prefill server."""
    with counterpart("decode", stack.prefills[0]) as other:
        yield other


@pytest.fixture(name="as_prefill")
def _as_prefill(stack: Stack) -> Iterator[Counterpart]:
    """The test plays the prefill server of a real decode server."""
    with counterpart("prefill", stack.prefills[0]) as other:
        yield other


def _ask(server: Server, other: Counterpart) -> _Asked:
    body = {
        "input_ids": _PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "rid": f"handover-{time.monotonic()}",
        **other.meeting(),
    }
    return _Asked(server, body)


def _end(kind: str, server: Server, asked: _Asked, other: Counterpart) -> None:
    if kind == "client gone":
        asked.leave()
    elif kind == "/abort_request":
        post(server.url, "/abort_request", {"rid": asked.body["rid"]})
    else:
        other.manager.stop()


def _is_over(kind: str, server: Server, asked: _Asked, leg: KVSender | KVReceiver) -> None:
    fails(leg, _AT_ONCE)
    wait_for(lambda: at_rest(server), f"{server.role} at rest", seconds=_AT_ONCE)
    if kind != "client gone":
        assert asked.status(_AT_ONCE) == (400 if kind == "/abort_request" else 503), asked.answer


_KINDS = ("client gone", "/abort_request", "the other server shuts down")


class TestPrefillServer:
    def _reach(self, stage: str, server: Server, other: Counterpart) -> tuple[_Asked, KVReceiver]:
        asked = _ask(server, other)
        receiver = other.receiver(asked.body)
        if stage == "met":
            wait_for(lambda: state(server)["control"]["open_rooms"] == 1, "the room is open")
            wait_until(lambda: getattr(receiver, "peer", None) is not None)
        else:
            other.ask(receiver, _PROMPT)
            reaches(receiver, KVPoll.Transferring)
            assert state(server)["control"]["published_bytes"] > 0
        return asked, receiver

    @pytest.mark.parametrize("stage", ["met", "in flight"])
    @pytest.mark.parametrize("kind", _KINDS)
    def test_ends_both_legs(
        self, stack: Stack, as_decode: Counterpart, stage: str, kind: str
    ) -> None:
        server = stack.prefills[0]
        asked, receiver = self._reach(stage, server, as_decode)
        _end(kind, server, asked, as_decode)
        _is_over(kind, server, asked, receiver)

    def test_drains(self, stack: Stack, as_decode: Counterpart) -> None:
        """After SIGTERM a hand-over still finishes, and nothing new begins."""
        server = stack.prefills[0]
        asked, receiver = self._reach("in flight", server, as_decode)
        server.process.signal(signal.SIGTERM)
        _takes_nothing_new(server, as_decode)
        assert receiver.poll() is KVPoll.Transferring
        commit_all(receiver)
        assert asked.status(_DRAIN_SECONDS) == 200, asked.answer
        assert server.process.wait(_DRAIN_SECONDS) == 0
        stack.processes.restart(server.process)
        stack.wait_ready([server])

    @pytest.mark.slow
    def test_does_not_drain_for_ever(self, stack: Stack, as_decode: Counterpart) -> None:
        server = stack.prefills[0]
        asked, receiver = self._reach("in flight", server, as_decode)
        server.process.signal(signal.SIGTERM)
        assert "shutting down" in fails(receiver, _DRAIN_SECONDS + _AT_ONCE)
        assert asked.status(_AT_ONCE) == 503
        assert server.process.wait(_DRAIN_SECONDS) == 0
        stack.processes.restart(server.process)
        stack.wait_ready([server])


class TestDecodeServer:
    def _reach(self, stage: str, server: Server, other: Counterpart) -> tuple[_Asked, KVSender]:
        asked = _ask(server, other)
        sender = other.sender(asked.body)
        reaches(sender, KVPoll.WaitingForInput)
        assert state(server)["kv_pages_used"] > 0
        if stage == "a part has come":
            assert sender.send([0], last=False)
            wait_until(lambda: other.manager.counters()["published_bytes"] == 0)
        return asked, sender

    @pytest.mark.parametrize("stage", ["waiting", "a part has come"])
    @pytest.mark.parametrize("kind", _KINDS)
    def test_ends_both_legs(
        self, stack: Stack, as_prefill: Counterpart, stage: str, kind: str
    ) -> None:
        server = stack.decodes[0]
        asked, sender = self._reach(stage, server, as_prefill)
        _end(kind, server, asked, as_prefill)
        _is_over(kind, server, asked, sender)

    def test_drains(self, stack: Stack, as_prefill: Counterpart) -> None:
        """After SIGTERM a hand-over still finishes, is answered, and nothing new begins."""
        server = stack.decodes[0]
        asked, sender = self._reach("a part has come", server, as_prefill)
        server.process.signal(signal.SIGTERM)
        _takes_nothing_new(server, as_prefill)
        assert sender.poll() is KVPoll.Transferring
        rest = list(range(1, -(-len(_PROMPT) // as_prefill.page_size)))
        last = metadata(first_token=9, prompt_tokens=len(_PROMPT))
        assert sender.send(rest, last=True, metadata=last)
        assert asked.status(_DRAIN_SECONDS) == 200, asked.answer
        assert asked.answer is not None and len(asked.answer[1]["output_ids"]) == 4
        reaches(sender, KVPoll.Success, _AT_ONCE)
        assert server.process.wait(_DRAIN_SECONDS) == 0
        stack.processes.restart(server.process)
        stack.wait_ready([server])

    @pytest.mark.slow
    def test_does_not_drain_for_ever(self, stack: Stack, as_prefill: Counterpart) -> None:
        server = stack.decodes[0]
        asked, sender = self._reach("a part has come", server, as_prefill)
        server.process.signal(signal.SIGTERM)
        assert "shutting down" in fails(sender, _DRAIN_SECONDS + _AT_ONCE)
        assert asked.status(_AT_ONCE) == 503
        assert server.process.wait(_DRAIN_SECONDS) == 0
        stack.processes.restart(server.process)
        stack.wait_ready([server])


@pytest.mark.slow
def test_a_router_that_waits_no_longer_ends_both_legs(tiny_model: pathlib.Path) -> None:
    """Four requests run, the others stand in the queues of both servers."""
    flags = {**by_role(_FLAGS), "router": ("--request-timeout-secs", "1", "--disable-retries")}
    with Stack(tiny_model, flags=flags) as stack:
        servers = [*stack.prefills, *stack.decodes]
        body = {
            "input_ids": _PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": 450, "ignore_eos": True},
        }
        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            asked = [threads.submit(post, stack.router_url, "/generate", body) for _ in range(24)]
            statuses = [each.result()[0] for each in asked]
        assert any(status != 200 for status in statuses), "all were answered within a second"
        for server in servers:
            wait_for(lambda server=server: at_rest(server), server.role, seconds=_AT_ONCE)  # type: ignore[misc]


def _takes_nothing_new(server: Server, other: Counterpart) -> None:
    """A new request is refused soon: with 503 at first, then there is nobody to connect to."""

    def refused() -> bool:
        body = {"input_ids": _PROMPT, **other.meeting()}
        try:
            return post(server.url, "/generate", body, timeout=5.0)[0] == 503
        except ConnectionRefusedError:
            return True

    wait_for(refused, "new requests are refused", seconds=_AT_ONCE)
