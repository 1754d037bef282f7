# SPDX-License-Identifier: Apache-2.0
"""How answers travel: heads, events, errors inside streams, clients that leave or read slowly."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.engine.request import FinishReason, Request
from kvferry.server.answer import sse_event
from kvferry.tests.server.running import (
    END_OF_CHUNKS,
    WAIT_SECONDS,
    Running,
    read_until,
    serving_script,
    wait_until,
)
from kvferry.tests.server.scripted import Piece, ScriptedScheduler, count_on, expected_text

_ABORT_400 = FinishReason("abort", message="no such thing", status=400)
_ABORT_503 = FinishReason("abort", message="the peer is gone", status=503)
_STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 5}}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
]


def _silent(request: Request) -> Iterator[Piece | None]:
    while True:
        yield None


def _endless(request: Request) -> Iterator[Piece | None]:
    while True:
        yield Piece(97)


def _chunks(raw: bytes) -> list[bytes]:
    """Splits a chunked body into its chunks."""
    chunks = []
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        raw = rest[length + 2 :]
    return chunks


def test_every_event_is_one_write(plain: Running) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 5}, "stream": True}
    with plain.raw_post("/generate", body) as connection:
        head, _, chunked = read_until(connection, END_OF_CHUNKS).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    chunks = _chunks(chunked)
    assert chunks[-2:] == [b"data: [DONE]\n\n", b""]
    for chunk in chunks[:-1]:
        assert chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and chunk.count(b"\n") == 2


def test_a_connection_is_used_again_after_a_stream(plain: Running) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "stream": True}
    with plain.raw_post("/generate", body) as connection:
        read_until(connection, END_OF_CHUNKS)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        assert read_until(connection, b"}").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("path", "body"), _STREAMS)
def test_the_head_waits_for_the_first_output(path: str, body: dict[str, Any]) -> None:
    gate = threading.Event()

    def script(request: Request) -> Iterator[Piece | None]:
        while not gate.is_set():
            yield None
        yield from count_on(request)

    scheduler = ScriptedScheduler(script)
    with serving_script(scheduler) as running:
        with running.raw_post(path, {**body, "stream": True}) as connection:
            wait_until(lambda: bool(scheduler.submitted), "the request is submitted")
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            gate.set()
            connection.settimeout(WAIT_SECONDS)
            assert read_until(connection, b"[DONE]").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("path", "body"), _STREAMS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [_ABORT_400, _ABORT_503])
def test_a_failure_before_the_first_output_is_a_status(
    path: str, body: dict[str, Any], stream: bool, reason: FinishReason
) -> None:
    scheduler = ScriptedScheduler(lambda request: iter([None, Piece(finish=reason)]))
    with serving_script(scheduler) as running:
        answer = running.post(path, {**body, "stream": stream})
    assert answer.status == reason.status
    assert answer.message == reason.message
    assert answer.headers["content-type"] == "application/json"
    # Else a router cuts it off at the wrong place.
    assert "content-length" not in answer.headers


@pytest.mark.parametrize(("path", "body"), _STREAMS)
def test_a_failure_inside_a_stream_is_an_event(path: str, body: dict[str, Any]) -> None:
    def script(request: Request) -> Iterator[Piece | None]:
        yield Piece(97)
        yield Piece(98)
        for _ in range(20):  # lets the first tokens leave
            yield None
        yield Piece(finish=_ABORT_503)

    with serving_script(ScriptedScheduler(script)) as running:
        answer = running.post(path, {**body, "stream": True})
    assert answer.status == 200
    assert answer.events[-1]["error"]["message"] == "the peer is gone"
    assert answer.events[-1]["error"]["code"] == 503
    assert all("error" not in event for event in answer.events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_sequence_fails_the_answer_and_ends_the_others(stream: bool) -> None:
    def script(request: Request) -> Iterator[Piece | None]:
        if request.prompt_ids[0] == ord("x"):
            return iter([None, Piece(finish=_ABORT_503)])
        return _silent(request)

    scheduler = ScriptedScheduler(script)
    with serving_script(scheduler) as running:
        answer = running.post("/generate", {"text": ["a", "x", "b"], "stream": stream})
        assert (answer.status, answer.message) == (503, "the peer is gone")
        wait_until(lambda: not scheduler.has_pending(), "the others are aborted")


@pytest.mark.parametrize(("path", "body"), _STREAMS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits(path: str, body: dict[str, Any], stream: bool) -> None:
    scheduler = ScriptedScheduler(_silent)
    with serving_script(scheduler) as running:
        with running.raw_post(path, {**body, "stream": stream}):
            wait_until(lambda: bool(scheduler.submitted), "the request is submitted")
        _, message, _ = scheduler.aborted.get(timeout=WAIT_SECONDS)
        assert message == "the client closed its connection"
        wait_until(lambda: not scheduler.has_pending(), "the request is aborted")


@pytest.mark.parametrize(("path", "body"), _STREAMS)
def test_a_client_that_leaves_inside_a_stream(path: str, body: dict[str, Any]) -> None:
    scheduler = ScriptedScheduler(_endless)
    with serving_script(scheduler) as running:
        with running.raw_post(path, {**body, "stream": True}) as connection:
            read_until(connection, b"data: ")
        scheduler.aborted.get(timeout=WAIT_SECONDS)
        wait_until(lambda: not scheduler.has_pending(), "the request is aborted")


def test_a_client_that_leaves_after_the_end_aborts_nothing() -> None:
    scheduler = ScriptedScheduler()
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    with serving_script(scheduler) as running:
        for _ in range(5):
            with running.raw_post("/generate", body) as connection:
                # A router leaves as soon as it has read the mark, before the last chunk.
                read_until(connection, b"data: [DONE]\n\n")
        assert running.get("/health").status == 200
    assert scheduler.aborted.empty()


def test_a_slow_client_gets_fewer_events_and_the_whole_text() -> None:
    piece = "x" * 20_000
    finished = threading.Event()

    def script(request: Request) -> Iterator[Piece | None]:
        for _ in range(199):
            yield Piece(97, piece)
        finished.set()
        yield Piece(97, piece, FinishReason("length"))

    scheduler = ScriptedScheduler(script)
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 200}, "stream": True}
    with serving_script(scheduler) as running:
        with running.raw_post("/generate", body) as connection:
            assert finished.wait(WAIT_SECONDS)
            wait_until(lambda: not scheduler.has_pending(), "the answer is complete")
            raw = read_until(connection, END_OF_CHUNKS)
    events = _chunks(raw.partition(b"\r\n\r\n")[2])[:-2]
    assert len(events) < 150
    last = json.loads(events[-1].removeprefix(b"data: "))
    assert last["text"] == piece * 200
    assert last["meta_info"]["completion_tokens"] == 200


def test_the_end_mark_in_a_text_is_escaped() -> None:
    def script(request: Request) -> Iterator[Piece | None]:
        yield Piece(97, "data: ")
        yield Piece(98, "[DONE]")
        yield Piece(99, " data: [DONE]\n\n", FinishReason("length"))

    text = "data: [DONE] data: [DONE]\n\n"
    with serving_script(ScriptedScheduler(script)) as running:
        for path, body in _STREAMS:
            answer = running.post(path, {**body, "stream": True})
            assert answer.body.count(b"data: [DONE]") == 1
            last = answer.events[-1]
            if path == "/generate":
                assert last["text"] == text
            assert running.post(path, body).status == 200


def test_sse_event() -> None:
    assert sse_event(b'{"a":1}') == b'data: {"a":1}\n\n'
    escaped = sse_event(b'{"a":"data: [DONE]data: [DONE]"}')
    assert b"data: [DONE]" not in escaped
    assert json.loads(escaped.removeprefix(b"data: ")) == {"a": "data: [DONE]data: [DONE]"}


def test_text_of_the_default_script(plain: Running) -> None:
    answer = plain.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 30}})
    assert answer.json["text"] == expected_text(b"abc", 30)
