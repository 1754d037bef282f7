# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvferry.server.errors import ApiError
from kvferry.server.prompts import INLINE_CHARS, PromptReader, read_ids
from kvferry.server.schemas import ChatBody
from kvferry.tests.server.scripted import ByteTokenizer


class _WatchedTokenizer(ByteTokenizer):
    """Notes on which threads it works."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return [256] * add_special_tokens + super().encode(text)


@pytest.fixture(name="reader")
def _reader() -> Iterator[PromptReader]:
    reader = PromptReader(_WatchedTokenizer(), max_context=1000)
    yield reader
    reader.close()


def _chat(reader: PromptReader, **fields: object) -> str:
    body = msgspec.json.decode(json.dumps(fields), type=ChatBody)
    return ByteTokenizer().decode(asyncio.run(reader.from_messages(body)))


def test_texts(reader: PromptReader) -> None:
    prompts = asyncio.run(reader.from_texts(["ab", "é"]))
    assert prompts == [(256, 97, 98), (256, 0xC3, 0xA9)]


def test_long_texts_are_tokenised_off_the_event_loop() -> None:
    tokenizer = _WatchedTokenizer()
    reader = PromptReader(tokenizer, max_context=100_000)
    asyncio.run(reader.from_texts(["x" * INLINE_CHARS]))
    asyncio.run(reader.from_texts(["x" * (INLINE_CHARS + 1)]))
    reader.close()
    here = threading.current_thread().name
    assert tokenizer.threads[0] == here
    assert tokenizer.threads[1].startswith("tokenize")


def test_a_hopelessly_long_text_is_refused_unread() -> None:
    tokenizer = _WatchedTokenizer()
    reader = PromptReader(tokenizer, max_context=100)
    with pytest.raises(ApiError, match="5000 characters, at least 5000 tokens; the context .* 100"):
        asyncio.run(reader.from_texts(["x" * 5000]))
    reader.close()
    assert tokenizer.threads == []


def test_empty_texts_are_refused(reader: PromptReader) -> None:
    with pytest.raises(ApiError, match="^the prompt is empty"):
        asyncio.run(reader.from_texts([""]))
    with pytest.raises(ApiError, match="^prompt 1 is empty"):
        asyncio.run(reader.from_texts(["a", ""]))


def test_a_text_that_the_tokenizer_refuses(reader: PromptReader) -> None:
    with pytest.raises(ApiError, match="^the prompt cannot be tokenised: "):
        asyncio.run(reader.from_texts(["\ud800"]))


def test_chat(reader: PromptReader) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert _chat(reader, messages=messages) == "<system>s<user>u<assistant>"
    assert _chat(reader, messages=messages, add_generation_prompt=False) == "<system>s<user>u"


def test_chat_content_parts(reader: PromptReader) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _chat(reader, messages=[{"role": "user", "content": parts}]) == "<user>a\nb<assistant>"


def test_chat_message_without_content(reader: PromptReader) -> None:
    assert _chat(reader, messages=[{"role": "assistant", "content": None}]) == (
        "<assistant><assistant>"
    )


def test_chat_continues_the_final_message(reader: PromptReader) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "so far"}]
    assert _chat(reader, messages=messages, continue_final_message=True) == (
        "<user>u<assistant>so far"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "messages is empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "forbidden", "content": ""}]}, "role 'forbidden' is not known"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\].content has a part of type 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": "u"}], "continue_final_message": True},
            "needs a last message of role 'assistant'",
        ),
        (
            {"messages": [{"role": "u"}], "chat_template_kwargs": {"messages": []}},
            "must not set 'messages'",
        ),
    ],
)
def test_chat_refusals(reader: PromptReader, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        _chat(reader, **fields)


def test_read_ids() -> None:
    assert read_ids("x", [1, 2.0]) == ([(1, 2)], False)
    assert read_ids("x", [[1, 2.0], [3]]) == ([(1, 2), (3,)], True)
    assert read_ids("x", [[1]]) == ([(1,)], True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: read_ids("x", []), "x is empty"),
        (lambda: read_ids("x", [[1], []]), r"x\[1\] is empty"),
        (lambda: read_ids("x", [1, [2]]), "x mixes token ids and lists"),
        (lambda: read_ids("x", [[1.5]]), r"x\[0\]\[0\] must be a whole number"),
    ],
)
def test_read_ids_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        call()


def test_texts_of_ids_outside_the_vocabulary(reader: PromptReader) -> None:
    assert reader.texts_of([(97, 10_000, 98), (-1,)]) == ["ab", ""]
