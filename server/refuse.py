# SPDX-License-Identifier: Apache-2.0
"""Refuses what this server does not implement and must not ignore.

A key whose absence would give another answer than the client asked for is refused with 400; all
other unknown keys are ignored.
"""

from __future__ import annotations

import msgspec

from kvferry.server.errors import ApiError
from kvferry.server.schemas import ChatBody, OpenAIBody

_GUIDED = "guided decoding is not implemented; leave it out"
_INPUTS = "this server takes text and token ids only"
_REASONS = {
    "regex": _GUIDED,
    "ebnf": _GUIDED,
    "json_schema": _GUIDED,
    "structural_tag": _GUIDED,
    "stop_regex": "use `stop` with fixed strings",
    "token_ids_logprob": "use `top_logprobs_num`",
    "input_embeds": _INPUTS,
    "image_data": _INPUTS,
    "video_data": _INPUTS,
    "audio_data": _INPUTS,
    "audio": _INPUTS,
    "lora_path": "adapters are not implemented",
    "session_params": "sessions are not implemented; send the whole prompt",
    "custom_logit_processor": "only `logit_bias` is implemented",
    "return_hidden_states": "hidden states are not returned",
    "return_entropy": "use `return_logprob`",
    "suffix": "this server only continues a prompt",
    "chat_template": "the model's own template is used",
}


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Refuses fields that are set and not implemented.

    Args:
      body: any request struct.

    Raises:
      ApiError: 400 naming the field.
    """
    for name in body.__struct_fields__:
        reason = _REASONS.get(name)
        if reason is not None and getattr(body, name) not in (None, False, [], "", {}):
            raise ApiError(f"{name} is not supported: {reason}")


def refuse_openai(body: OpenAIBody) -> None:
    """Refuses what only the OpenAI routes know.

    Args:
      body: body of a completion or chat request.

    Raises:
      ApiError: 400 naming the field and its value.
    """
    refuse_unsupported(body)
    if body.response_format is not None and body.response_format.type not in (None, "text"):
        raise ApiError(f"response_format {body.response_format.type!r} is not supported: {_GUIDED}")
    if body.temperature is not None and not 0 <= body.temperature <= 2.000001:
        raise ApiError(f"temperature must be between 0 and 2, is {body.temperature:g}")


def refuse_chat(body: ChatBody) -> None:
    """Refuses what only the chat route knows.

    Tools are accepted and not used as long as the model may answer in words.

    Args:
      body: body of a chat request.

    Raises:
      ApiError: 400 naming the field and its value.
    """
    refuse_openai(body)
    for name, choice in (("tool_choice", body.tool_choice), ("function_call", body.function_call)):
        if choice not in (None, "none", "auto"):
            raise ApiError(f"{name} {choice!r} is not supported: tool calls are not implemented")
    if body.modalities is not None and body.modalities != ["text"]:
        raise ApiError(f"modalities {body.modalities!r} are not supported: answers are text")
