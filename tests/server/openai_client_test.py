# SPDX-License-Identifier: Apache-2.0
"""The `openai` package as a client."""

from collections.abc import Iterator

import openai
import pytest

from kvferry.engine.request import FinishReason, Request
from kvferry.tests.server.running import Running, serving_script
from kvferry.tests.server.scripted import Piece, ScriptedScheduler, expected_text

_PROMPT = "<user>hi<assistant>"


@pytest.fixture(name="client")
def _client(plain: Running) -> Iterator[openai.OpenAI]:
    with _connect(plain) as client:
        yield client


def _connect(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="EMPTY", max_retries=0, timeout=20)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["a", "bb"], max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["bcd", "cde"]
    assert answer.usage is not None and answer.usage.total_tokens == 9
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == ["b", "c", "d"]


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="m", prompt=[1, 2], max_tokens=5, stream=True)
    assert "".join(part.choices[0].text for part in stream) == expected_text([1, 2], 5)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=3,
        n=2,
        logprobs=True,
        top_logprobs=1,
        extra_body={"top_k": 5, "ignore_eos": True},
    )
    assert [choice.message.content for choice in answer.choices] == [expected_text(_PROMPT, 3)] * 2
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 3 and len(logprobs.content[0].top_logprobs) == 1


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == expected_text(_PROMPT, 5)
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 5


def test_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be between 0 and 2"):
        client.completions.create(model="m", prompt="a", temperature=5)


def test_full_queue() -> None:
    scheduler = ScriptedScheduler(max_live=1)
    with serving_script(scheduler) as running, _connect(running) as client:
        with pytest.raises(openai.InternalServerError, match="waiting already") as caught:
            client.completions.create(model="m", prompt=["a", "b"])
    assert caught.value.status_code == 503


def test_error_inside_a_stream() -> None:
    def script(request: Request) -> Iterator[Piece | None]:
        yield Piece(97)
        yield from [None] * 20
        yield Piece(finish=FinishReason("abort", message="the peer is gone", status=503))

    with serving_script(ScriptedScheduler(script)) as running, _connect(running) as client:
        stream = client.completions.create(model="m", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="the peer is gone"):
            list(stream)
