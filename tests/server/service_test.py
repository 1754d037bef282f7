# SPDX-License-Identifier: Apache-2.0
from typing import Any

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
