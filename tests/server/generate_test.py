# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from kvferry.engine.request import FinishReason, Request
from kvferry.tests.server.running import Running, serving_script
from kvferry.tests.server.scripted import MAX_CONTEXT, Piece, ScriptedScheduler, expected_text

_MEETING = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}


def _ask(running: Running, **fields: Any) -> Any:
    answer = running.post("/generate", fields)
    assert answer.status == 200, answer.body
    return answer.json


def _submitted(running: Running) -> list[Request]:
    scheduler = running.service.scheduler
    assert isinstance(scheduler, ScriptedScheduler)
    return scheduler.submitted


def test_one_text(plain: Running) -> None:
    answer = _ask(plain, text="abc", sampling_params={"max_new_tokens": 4}, rid="me")
    latency = answer["meta_info"].pop("e2e_latency")
    assert 0 <= latency < 20
    assert answer == {
        "text": "defg",
        "output_ids": [100, 101, 102, 103],
        "meta_info": {
            "id": "me",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 3,
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": 4,
            "cached_tokens": 0,
        },
    }


def test_token_ids(plain: Running) -> None:
    answer = _ask(plain, input_ids=[1, 2.0, 3], sampling_params={"max_new_tokens": 2.0})
    assert answer["text"] == expected_text([1, 2, 3], 2)


def test_put_is_accepted(plain: Running) -> None:
    assert plain.request("PUT", "/generate", b'{"text":"abc"}').status == 200


def test_default_length(plain: Running) -> None:
    assert _ask(plain, text="abc")["meta_info"]["completion_tokens"] == 128


def test_the_default_length_is_cut_to_the_context(plain: Running) -> None:
    prompt = "x" * (MAX_CONTEXT - 5)
    assert _ask(plain, text=prompt)["meta_info"]["completion_tokens"] == 5


def test_ids_are_made_up_when_none_is_given(plain: Running) -> None:
    ids = {_ask(plain, text="abc")["meta_info"]["id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_rid_may_be_used_again(plain: Running) -> None:
    for _ in range(2):
        assert _ask(plain, text="abc", rid="again")["meta_info"]["id"] == "again"


def test_batches_are_lists_in_order(plain: Running) -> None:
    answers = _ask(plain, text=["a", "bb", "ccc"], sampling_params={"max_new_tokens": 3}, rid="r")
    assert [item["text"] for item in answers] == [expected_text("x" * n, 3) for n in (1, 2, 3)]
    assert [item["meta_info"]["id"] for item in answers] == ["r_0", "r_1", "r_2"]


def test_a_batch_of_one_is_a_list(plain: Running) -> None:
    assert len(_ask(plain, input_ids=[[1, 2]])) == 1
    assert len(_ask(plain, text=["ab"])) == 1


def test_parameters_per_prompt(plain: Running) -> None:
    answers = _ask(
        plain,
        text=["a", "b"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        rid=["x", "y"],
        return_logprob=[True, False],
    )
    assert [item["meta_info"]["completion_tokens"] for item in answers] == [1, 2]
    assert [item["meta_info"]["id"] for item in answers] == ["x", "y"]
    assert ["output_token_logprobs" in item["meta_info"] for item in answers] == [True, False]


def test_samples(plain: Running) -> None:
    answers = _ask(plain, text="abc", sampling_params={"max_new_tokens": 1, "n": 3, "seed": 5})
    assert len(answers) == 3
    assert len({item["meta_info"]["id"] for item in answers}) == 3
    assert [request.params.seed for request in _submitted(plain)[-3:]] == [5, 6, 7]


def test_samples_of_a_batch_stand_side_by_side(plain: Running) -> None:
    answers = _ask(plain, text=["a", "bb"], sampling_params={"max_new_tokens": 1, "n": 2})
    assert [item["meta_info"]["prompt_tokens"] for item in answers] == [1, 1, 2, 2]


def test_sampling_seed_is_the_seed(plain: Running) -> None:
    _ask(plain, text="abc", sampling_params={"sampling_seed": 9, "max_new_tokens": 1})
    assert _submitted(plain)[-1].params.seed == 9


def test_stream_events_repeat_the_whole_text(plain: Running) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 5}, "stream": True, "rid": "s"}
    events = plain.post("/generate", body).events
    for before, after in zip(events, events[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in before["meta_info"]
    assert {event["meta_info"]["id"] for event in events} == {"s"}
    whole = _ask(plain, text="abc", sampling_params={"max_new_tokens": 5}, rid="s")
    for answer in (whole, events[-1]):
        assert answer["meta_info"].pop("e2e_latency") >= 0
    assert events[-1] == whole


def test_stream_of_a_batch_has_indices(plain: Running) -> None:
    body = {"text": ["a", "bb"], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    events = plain.post("/generate", body).events
    for index, prompt in enumerate(("a", "bb")):
        last = [event for event in events if event["index"] == index][-1]
        assert last["text"] == expected_text(prompt, 3)
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize(
    ("finish", "shape"),
    [
        (FinishReason("stop", 2), {"type": "stop", "matched": 2}),
        (FinishReason("stop", "end"), {"type": "stop", "matched": "end"}),
        (FinishReason("length"), {"type": "length", "length": 1}),
    ],
)
def test_finish_reasons(finish: FinishReason, shape: dict[str, object]) -> None:
    scheduler = ScriptedScheduler(lambda request: iter([Piece(97, finish=finish)]))
    with serving_script(scheduler) as running:
        assert _ask(running, text="abc")["meta_info"]["finish_reason"] == shape


def test_text_that_comes_after_its_tokens() -> None:
    def pieces() -> list[Piece | None]:
        return [Piece(0xC3, ""), Piece(0xA9, "é"), Piece(97, "", FinishReason("length"))]

    with serving_script(ScriptedScheduler(lambda request: iter(pieces()))) as running:
        assert _ask(running, text="abc")["text"] == "é"
        events = running.post("/generate", {"text": "abc", "stream": True}).events
    assert events[-1]["text"] == "é"
    assert events[-1]["output_ids"] == [0xC3, 0xA9, 97]


def test_no_logprobs_unless_asked_for(plain: Running) -> None:
    meta = _ask(plain, text="abc", return_logprob=False)["meta_info"]
    assert not [key for key in meta if "logprob" in key]


def test_logprobs(plain: Running) -> None:
    meta = _ask(
        plain,
        text="abc",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        sampling_params={"max_new_tokens": 2},
    )["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, None], [-0.98, 98, None], [-0.99, 99, None]]
    assert meta["output_token_logprobs"] == [[-1.0, 100, None], [-1.01, 101, None]]
    assert meta["output_top_logprobs"][1] == [[-1.01, 101, None], [-2.01, 102, None]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][2] == [[-0.99, 99, None], [-1.99, 100, None]]


def test_logprobs_of_the_output_alone(plain: Running) -> None:
    meta = _ask(plain, text="abc", return_logprob=True, sampling_params={"max_new_tokens": 1})
    assert meta["meta_info"]["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta["meta_info"]


def test_logprobs_with_texts(plain: Running) -> None:
    meta = _ask(
        plain,
        text="abc",
        return_logprob=True,
        logprob_start_len=1.0,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 1},
    )["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 98, "b"], [-0.99, 99, "c"]]
    assert meta["output_token_logprobs"] == [[-1.0, 100, "d"]]


def test_logprobs_in_a_stream_add_up(plain: Running) -> None:
    body = {
        "text": "abc",
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 4},
        "stream": True,
    }
    events = plain.post("/generate", body).events
    for event in events:
        assert len(event["meta_info"]["input_token_logprobs"]) == 3
    whole = _ask(plain, **(body | {"stream": False}))
    assert (
        events[-1]["meta_info"]["output_token_logprobs"]
        == (whole["meta_info"]["output_token_logprobs"])
    )


def test_decode_leaves_the_prompts_logprobs_to_prefill(decode_side: Running) -> None:
    body = {
        **_MEETING,
        "text": "abc",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "sampling_params": {"max_new_tokens": 2},
    }
    meta = _ask(decode_side, **body)["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["input_top_logprobs"] == []
    assert len(meta["output_token_logprobs"]) == 2
    assert _submitted(decode_side)[-1].logprob_start_len == -1
    for event in decode_side.post("/generate", {**body, "stream": True}).events:
        assert event["meta_info"]["input_token_logprobs"] == []


def test_prefill_stops_after_one_token(prefill_side: Running) -> None:
    params = {"max_new_tokens": 50, "min_new_tokens": 20, "stop": ["zz"], "temperature": 0.5}
    answer = _ask(prefill_side, **_MEETING, text="abc", sampling_params=params)
    assert answer["output_ids"] == [100]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    given = _submitted(prefill_side)[-1].params
    assert (given.max_new_tokens, given.min_new_tokens) == (1, 1)
    assert (given.stop, given.temperature) == (("zz",), 0.5)


def test_prefill_streams_when_asked_to(prefill_side: Running) -> None:
    body = {**_MEETING, "text": "abc", "stream": True, "return_logprob": True}
    (event,) = prefill_side.post("/generate", {**body, "logprob_start_len": 0}).events
    assert event["output_ids"] == [100]
    assert len(event["meta_info"]["input_token_logprobs"]) == 3


def test_prefill_without_a_token_to_make(prefill_side: Running) -> None:
    params = {"max_new_tokens": 0}
    assert _ask(prefill_side, **_MEETING, text="abc", sampling_params=params)["output_ids"] == []


def test_meetings_reach_the_engine(decode_side: Running) -> None:
    params = {"max_new_tokens": 1, "n": 2}
    _ask(decode_side, **_MEETING, text=["a", "b"], sampling_params=params)
    meetings = [request.bootstrap for request in _submitted(decode_side)[-4:]]
    assert [m.room for m in meetings if m is not None] == [77, 78, 79, 80]
    assert {(m.host, m.port) for m in meetings if m is not None} == {("127.0.0.1", 8998)}


def test_an_unpaired_server_ignores_meetings(plain: Running) -> None:
    _ask(plain, **(_MEETING | {"bootstrap_room": [1, 2, 3]}), text="abc")
    assert _submitted(plain)[-1].bootstrap is None
