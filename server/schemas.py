# SPDX-License-Identifier: Apache-2.0
"""The request bodies as typed structs.

Every field may be null or absent. Whole numbers are declared `Number`, because a router rewrites
JSON and sends `0` as `0.0`; `fields.whole` turns them into ints. Keys that are not listed here are
ignored; keys that cannot be ignored without changing the meaning of a request are listed only to be
refused (see `refuse.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling parameters that all routes share, under their common names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Number] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[int, float] | None = None
    seed: Number | None = None
    n: Number | None = None
    # Refused.
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Any = None
    structural_tag: Any = None
    stop_regex: Any = None


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: Number | None = None
    min_new_tokens: Number | None = None
    sampling_seed: Number | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """Body of /generate."""

    text: str | list[str] | None = None
    input_ids: list[Number | list[Number]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Number | list[Number] | None = None
    top_logprobs_num: Number | list[Number] | None = None
    return_text_in_logprobs: bool | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Number | list[Number | None] | None = None
    bootstrap_room: Number | list[Number] | None = None
    # Refused.
    token_ids_logprob: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool | list[bool] | None = None
    return_entropy: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of the OpenAI routes."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format` of the OpenAI routes."""

    type: str | None = None


class OpenAIBody(SamplingFields, kw_only=True):
    """What the bodies of the two OpenAI routes have in common."""

    model: str | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None
    response_format: ResponseFormat | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Number | list[Number | None] | None = None
    bootstrap_room: Number | list[Number] | None = None
    # Refused.
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | Number | list[Number]] | None = None
    logprobs: Number | None = None
    echo: bool | None = None
    best_of: Number | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a chat message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One chat message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(OpenAIBody, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused where ignoring them would change the answer.
    chat_template: str | None = None
    tool_choice: str | dict[str, Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /tokenize."""

    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[Number | list[Number]] | None = None
    skip_special_tokens: bool | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None
