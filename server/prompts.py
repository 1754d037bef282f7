# SPDX-License-Identifier: Apache-2.0
"""Turns texts, token ids and conversations into prompts, without holding up the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvferry.server.errors import ApiError
from kvferry.server.fields import whole_list
from kvferry.server.interfaces import TextTokenizer
from kvferry.server.schemas import ChatBody, ChatMessage, Number

# Shorter texts are tokenised at once: handing them to a thread costs more than the work.
INLINE_CHARS = 4000

ResultT = TypeVar("ResultT")

_RESERVED = ("messages", "add_generation_prompt")


class PromptReader:
    """Tokenises prompts.

    Args:
      tokenizer: the model's tokenizer.
      max_context: longest prompt in tokens that the engine could take.
    """

    def __init__(self, tokenizer: TextTokenizer, max_context: int):
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._longest_token: int | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Ends the tokenising thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def from_texts(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        """Tokenises texts.

        Args:
          texts: the prompts.
          add_special_tokens: whether the tokenizer adds its own start token and the like.

        Returns:
          One tuple of token ids per text.

        Raises:
          ApiError: 400 if a text is empty, far too long, or cannot be encoded.
        """
        for index, text in enumerate(texts):
            if not text:
                raise ApiError(f"{_where(index, texts)} is empty; give at least one character")
        work = functools.partial(self._encode, texts, add_special_tokens)
        return await self._run(work, sum(map(len, texts)))

    async def from_messages(self, body: ChatBody) -> tuple[int, ...]:
        """Renders a conversation with the model's chat template and tokenises it.

        Args:
          body: the chat request.

        Returns:
          The token ids of the prompt.

        Raises:
          ApiError: 400 if there is no message, a part is not text, or the template refuses.
        """
        if not body.messages:
            raise ApiError("messages is empty; give at least one message")
        messages = [_message(i, message) for i, message in enumerate(body.messages)]
        kwargs = dict(body.chat_template_kwargs or {})
        for name in _RESERVED:
            if name in kwargs:
                raise ApiError(f"chat_template_kwargs must not set {name!r}")
        add_prompt = body.add_generation_prompt is not False
        tail = ""
        if body.continue_final_message:
            if messages[-1]["role"] != "assistant":
                raise ApiError("continue_final_message needs a last message of role 'assistant'")
            tail, add_prompt = str(messages.pop().get("content", "")), True

        def render() -> tuple[int, ...]:
            text = self._render(messages, add_prompt, kwargs) + tail
            if not text:
                raise ApiError("the chat template made an empty prompt of these messages")
            # The template has written the special tokens itself.
            return self._encode([text], False)[0]

        return await self._run(render, sum(len(str(m.get("content", ""))) for m in messages))

    def texts_of(self, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        """Returns prompts given as token ids as text; ids outside the vocabulary give none.

        Args:
          prompts: token ids per prompt.

        Returns:
          One text per prompt.
        """
        size = self._tokenizer.vocab_size
        known = ([token for token in prompt if 0 <= token < size] for prompt in prompts)
        return [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in known]

    async def tokenize(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Tokenises texts of any length, empty ones too.

        Args:
          texts: the texts.
          add_special_tokens: whether the tokenizer adds its own start token and the like.

        Returns:
          Token ids per text.
        """

        def work() -> list[list[int]]:
            return [list(self._tokenizer.encode(text, add_special_tokens)) for text in texts]

        return await self._run(work, sum(map(len, texts)))

    async def _run(self, work: Callable[[], ResultT], size: int) -> ResultT:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except (ValueError, TypeError) as error:
            raise ApiError(f"the chat template refused these messages: {error}") from error

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        prompts = []
        for index, text in enumerate(texts):
            self._check_length(_where(index, texts), text)
            try:
                prompts.append(tuple(self._tokenizer.encode(text, add_special_tokens)))
            except (ValueError, TypeError) as error:
                raise ApiError(f"{_where(index, texts)} cannot be tokenised: {error}") from error
        return prompts

    def _check_length(self, name: str, text: str) -> None:
        # Megabytes take seconds to tokenise. No token is longer than the longest one, which gives
        # a lower bound of the token count at no cost.
        if len(text) <= 16 * self._max_context:
            return
        if self._longest_token is None:
            tokenizer = self._tokenizer
            lengths = (len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
            self._longest_token = max(1, *lengths)
        least = -(-len(text) // self._longest_token)
        if least > self._max_context:
            raise ApiError(
                f"{name} has {len(text)} characters, at least {least} tokens; the context of this"
                f" server is {self._max_context} tokens"
            )


def read_ids(
    name: str, value: Sequence[Number | list[Number]]
) -> tuple[list[tuple[int, ...]], bool]:
    """Reads one prompt, or several, given as token ids.

    Args:
      name: name of the field, for the message.
      value: token ids, or lists of token ids.

    Returns:
      The prompts, and whether they came as a list (one list of one prompt is a batch too).

    Raises:
      ApiError: 400 if the list is empty, a prompt is empty, or numbers and lists are mixed.
    """
    if not value:
        raise ApiError(f"{name} is empty; give at least one token id")
    lists = [item for item in value if isinstance(item, list)]
    numbers = [item for item in value if not isinstance(item, list)]
    if not lists:
        return [whole_list(name, numbers)], False
    if numbers:
        raise ApiError(f"{name} mixes token ids and lists of token ids; give one or the other")
    for index, item in enumerate(lists):
        if not item:
            raise ApiError(f"{name}[{index}] is empty; give at least one token id")
    return [whole_list(f"{name}[{index}]", item) for index, item in enumerate(lists)], True


def _where(index: int, texts: Sequence[str]) -> str:
    return "the prompt" if len(texts) == 1 else f"prompt {index}"


def _message(index: int, message: ChatMessage) -> dict[str, object]:
    fields: dict[str, object] = {
        name: getattr(message, name)
        for name in message.__struct_fields__
        if getattr(message, name) is not None
    }
    fields["content"] = _content(index, message)
    return fields


def _content(index: int, message: ChatMessage) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise ApiError(
                f"messages[{index}].content has a part of type {part.type!r}; this server takes"
                " parts of type 'text' with a `text` only"
            )
    return "\n".join(part.text or "" for part in message.content)
