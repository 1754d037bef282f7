# SPDX-License-Identifier: Apache-2.0
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.engine.request import Request
from kvferry.server.service import ServiceHooks
from kvferry.tests.server.running import Running, serving_script, wait_until
from kvferry.tests.server.scripted import MAX_CONTEXT, Piece, ScriptedScheduler


def _silent(request: Request) -> Iterator[Piece | None]:
    while True:
        yield None


def test_health(plain: Running) -> None:
    assert plain.get("/health").status == 200
    assert plain.get("/health", {"Authorization": "Bearer nonsense"}).status == 200
    assert plain.request("HEAD", "/health", None).status == 200


def test_health_before_the_server_is_ready() -> None:
    with serving_script(ScriptedScheduler()) as running:
        running.service.set_not_ready("compiling 3 of 12")
        for path in ("/health", "/health_generate"):
            answer = running.get(path)
            assert answer.status == 503
            assert answer.message == "the server is not available: compiling 3 of 12"
        assert running.post("/generate", {"text": "abc"}).status == 503
        running.service.set_ready()
        assert running.get("/health").status == 200


def test_health_when_another_thread_has_failed() -> None:
    complaints: list[str | None] = [None, None]
    checks = [lambda: complaints[0], lambda: complaints[1]]
    with serving_script(ScriptedScheduler(), ServiceHooks(fault_checks=checks)) as running:
        assert running.get("/health").status == 200
        assert running.get("/livez").status == 200
        complaints[1] = "the control thread ended"
        assert running.get("/health").message.endswith("the control thread ended")
        assert running.get("/livez").status == 503
        message = "the server has to be restarted: the control thread ended"
        assert running.get("/livez").message == message
        assert running.post("/generate", {"text": "abc"}).status == 503


def test_a_server_that_is_not_ready_lives() -> None:
    complaints = ["not registered"]
    hooks = ServiceHooks(ready_checks=[lambda: complaints[0] if complaints else None])
    with serving_script(ScriptedScheduler(), hooks) as running:
        assert running.get("/health").message.endswith("not registered")
        assert running.get("/livez").status == 200
        assert running.post("/generate", {"text": "abc"}).status == 503
        complaints.clear()
        assert running.get("/health").status == 200


def test_health_when_the_step_thread_has_failed() -> None:
    def boom() -> None:
        raise ArithmeticError("boom")

    scheduler = ScriptedScheduler(_silent)
    with serving_script(scheduler) as running:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(running.post("/generate", {"text": "abc"}))
        )
        thread.start()
        wait_until(scheduler.has_pending, "the request runs")
        scheduler.call_soon(boom)
        thread.join(20)
        assert answers[0].status == 503
        answer = running.get("/health")
        assert running.get("/livez").status == 503
    assert answer.status == 503
    assert answer.message.endswith("the step thread ended: ArithmeticError: boom")


def test_health_does_not_queue_behind_requests() -> None:
    scheduler = ScriptedScheduler(_silent)
    with serving_script(scheduler) as running:
        with running.raw_post("/generate", {"text": "abc"}):
            wait_until(scheduler.has_pending, "the request runs")
            began = time.monotonic()
            assert running.get("/health").status == 200
            assert time.monotonic() - began < 1


def test_health_generate_makes_a_token(plain: Running) -> None:
    scheduler = plain.service.scheduler
    assert isinstance(scheduler, ScriptedScheduler)
    before = len(scheduler.submitted)
    assert plain.get("/health_generate").status == 200
    (request,) = scheduler.submitted[before:]
    assert request.params.max_new_tokens == 1


def test_health_generate_of_half_a_pair(decode_side: Running) -> None:
    assert decode_side.get("/health_generate").status == 200


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(path: str) -> None:
    extra = {"tp_size": 2, "version": "9"}
    with serving_script(ScriptedScheduler(), role="decode", server_info=extra) as running:
        info = running.get(path).json
    assert info["served_model_name"] == "scripted"
    assert info["disaggregation_mode"] == "decode"
    assert info["max_context"] == MAX_CONTEXT
    assert (info["tp_size"], info["version"]) == (2, "9")
    assert info["internal_states"][0]["num_running_reqs"] == 0


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(path: str) -> None:
    with serving_script(ScriptedScheduler(), model_info={"model_type": "llama"}) as running:
        info = running.get(path).json
    assert info["is_generation"] is True
    assert info["model_type"] == "llama"


def test_models(plain: Running) -> None:
    listing = plain.get("/v1/models").json
    assert listing["object"] == "list"
    assert [entry["id"] for entry in listing["data"]] == ["scripted"]
    assert plain.get("/v1/models/scripted").json["id"] == "scripted"
    answer = plain.get("/v1/models/other")
    assert answer.status == 404
    assert "no model 'other'" in answer.message


def test_get_load() -> None:
    scheduler = ScriptedScheduler(_silent)
    with serving_script(scheduler) as running:
        assert running.get("/get_load").json == [
            {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
        ]
        with running.raw_post("/generate", {"text": "abc"}):
            wait_until(scheduler.has_pending, "the request runs")
            (load,) = running.get("/get_load").json
    assert (load["num_reqs"], load["num_tokens"]) == (1, 3)


def test_flush_cache(plain: Running) -> None:
    assert plain.post("/flush_cache", b"").status == 200
    assert plain.get("/flush_cache").status == 200


@pytest.mark.parametrize("rid", ["mine", "mine_1"])
@pytest.mark.parametrize("stream", [False, True])
def test_abort_request(rid: str, stream: bool) -> None:
    scheduler = ScriptedScheduler(_silent)
    body = {"text": ["a", "b"], "rid": "mine", "stream": stream}
    with serving_script(scheduler) as running:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(running.post("/generate", body)))
        thread.start()
        wait_until(lambda: scheduler.stats().live == 2, "both sequences run")
        assert running.post("/abort_request", {"rid": "min"}).json == {"aborted": 0}
        assert running.post("/abort_request", {"rid": rid}).json == {"aborted": 1}
        thread.join(20)
        # Not 503, which a router would repeat.
        assert answers[0].status == 400
        assert answers[0].message == f"request '{rid}' was aborted"
        wait_until(lambda: not scheduler.has_pending(), "the sequences are gone")
        assert running.post("/abort_request", {"rid": rid}).json == {"aborted": 0}


@pytest.mark.parametrize(
    ("path", "rid"),
    [
        ("/v1/completions", "mine"),
        ("/v1/completions", "cmpl-mine"),
        ("/v1/chat/completions", "mine"),
        ("/v1/chat/completions", "chatcmpl-mine"),
    ],
)
def test_abort_request_of_the_openai_routes(path: str, rid: str) -> None:
    scheduler = ScriptedScheduler(_silent)
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "rid": "mine"}
    del body["messages" if path == "/v1/completions" else "prompt"]
    with serving_script(scheduler) as running:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(running.post(path, body)))
        thread.start()
        wait_until(scheduler.has_pending, "the request runs")
        assert running.post("/abort_request", {"rid": rid}).json == {"aborted": 1}
        thread.join(20)
        assert answers[0].status == 400
        assert answers[0].message == f"request '{rid}' was aborted"


def test_abort_all() -> None:
    scheduler = ScriptedScheduler(_silent)
    with serving_script(scheduler) as running:
        with running.raw_post("/generate", {"text": "a"}):
            wait_until(scheduler.has_pending, "the request runs")
            assert running.post("/abort_request", {"abort_all": True}).json == {"aborted": 1}
            wait_until(lambda: not scheduler.has_pending(), "the request is gone")


def test_abort_request_needs_a_name(plain: Running) -> None:
    assert plain.post("/abort_request", {}).status == 400


def test_tokenize(plain: Running) -> None:
    answer = plain.post("/tokenize", {"prompt": "ab", "model": "x"}).json
    assert answer == {"tokens": [97, 98], "count": 2, "max_model_len": MAX_CONTEXT}
    assert plain.post("/tokenize", {"prompt": ["a", ""]}).json["tokens"] == [[97], []]
    assert plain.post("/tokenize", {}).status == 400


def test_detokenize(plain: Running) -> None:
    assert plain.post("/detokenize", {"tokens": [97, 98]}).json == {"text": "ab"}
    assert plain.post("/detokenize", {"tokens": [[97], [98]]}).json == {"text": ["a", "b"]}
    assert plain.post("/detokenize", {"tokens": []}).json == {"text": ""}
    assert plain.post("/detokenize", {"tokens": [5000]}).status == 400
    assert plain.post("/detokenize", {}).status == 400
