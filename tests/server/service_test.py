# SPDX-License-Identifier: Apache-2.0
from typing import Any

from kvferry.server.service import ServiceHooks
from kvferry.tests.server.running import Running, serving_script, wait_until
from kvferry.tests.server.scripted import ScriptedScheduler


def test_a_full_queue_is_503_and_submits_nothing() -> None:
    scheduler = ScriptedScheduler(lambda request: iter([None] * 10**6), max_live=2)
    with serving_script(scheduler) as running:
        answer = running.post("/generate", {"text": ["a", "b", "c"]})
        assert (answer.status, answer.message) == (503, "2 requests are waiting already")
        # The two that found room are taken back.
        wait_until(lambda: scheduler.aborted.qsize() == 2, "the others are aborted")
        assert not scheduler.has_pending()
        assert running.get("/health").status == 200


def test_nothing_is_submitted_when_one_sequence_is_invalid(plain: Running) -> None:
    scheduler = plain.service.scheduler
    assert isinstance(scheduler, ScriptedScheduler)
    before = len(scheduler.submitted)
    answer = plain.post("/generate", {"input_ids": [[1], [2], [5000]]})
    assert answer.status == 400
    assert "5000" in answer.message
    assert len(scheduler.submitted) == before


def test_prefill_and_decode_refuse_alike(prefill_side: Running, decode_side: Running) -> None:
    meeting: dict[str, Any] = {"bootstrap_host": "h", "bootstrap_room": 1}
    bad: list[dict[str, Any]] = [
        {"text": "x" * 600},
        {"text": "x", "sampling_params": {"max_new_tokens": 600}},
        {"text": "x", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
        {"text": "x", "logprob_start_len": 9, "return_logprob": True},
        {"input_ids": [1, 5000]},
    ]
    for body in bad:
        answers = [
            side.post("/generate", {**meeting, **body}) for side in (prefill_side, decode_side)
        ]
        assert [answer.status for answer in answers] == [400, 400]
        assert answers[0].message == answers[1].message


def test_half_a_pair_needs_a_meeting(prefill_side: Running, decode_side: Running) -> None:
    for side in (prefill_side, decode_side):
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
            answer = side.post(path, body)
            assert answer.status == 400
            assert "send the request to the router" in answer.message


def test_a_request_waits_for_no_peer_when_it_is_invalid(decode_side: Running) -> None:
    answer = decode_side.post("/generate", {"bootstrap_host": "h", "bootstrap_room": 1})
    assert answer.status == 400
    assert "`text` and `input_ids`" in answer.message


def test_the_other_half_hears_of_a_refusal() -> None:
    """What the scheduler never gets to see must not keep the peer waiting."""
    told: list[tuple[int, str]] = []
    hooks = ServiceHooks(refused=lambda meeting, reason: told.append((meeting.room, reason)))
    scheduler = ScriptedScheduler(lambda request: iter([None] * 10**6), max_live=2)
    with serving_script(scheduler, hooks, role="decode") as running:
        body = {"text": ["a", "b", "c", "d"], "bootstrap_host": "h", "bootstrap_room": 7}
        assert running.post("/generate", body).status == 503
        # Two were submitted: the scheduler ends those.
        reason = "2 requests are waiting already"
        assert told == [(9, reason), (10, reason)]
        told.clear()
        running.service.set_not_ready("shutting down")
        assert running.post("/generate", body).status == 503
        assert [room for room, _ in told] == [7, 8, 9, 10]
        assert "shutting down" in told[0][1]
        running.service.set_ready()
