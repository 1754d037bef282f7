# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from kvferry.server.errors import ApiError
from kvferry.server.refuse import refuse_chat, refuse_openai, refuse_unsupported
from kvferry.server.schemas import ChatBody, CompletionBody, GenerateBody, GenerateSampling


@pytest.mark.parametrize(
    "raw",
    [
        '{"token_ids_logprob":[1]}',
        '{"input_embeds":[[0.5]]}',
        '{"image_data":"x"}',
        '{"lora_path":"x"}',
        '{"session_params":{"id":"x"}}',
        '{"return_hidden_states":true}',
        '{"custom_logit_processor":"x"}',
    ],
)
def test_generate_refuses(raw: str) -> None:
    body = msgspec.json.decode(raw, type=GenerateBody)
    with pytest.raises(ApiError, match=f"^{raw.split(chr(34))[1]} is not supported: "):
        refuse_unsupported(body)


@pytest.mark.parametrize("name", ["regex", "ebnf", "json_schema", "structural_tag", "stop_regex"])
def test_guided_decoding_is_refused(name: str) -> None:
    body = msgspec.json.decode(f'{{"{name}":"x"}}', type=GenerateSampling)
    with pytest.raises(ApiError, match=f"^{name} is not supported: "):
        refuse_unsupported(body)


def test_what_a_router_adds_by_default_is_not_refused() -> None:
    raw = (
        '{"return_hidden_states":false,"return_entropy":false,"lora_path":null,"regex":null,'
        '"image_data":null,"session_params":null}'
    )
    refuse_unsupported(msgspec.json.decode(raw, type=GenerateBody))
    refuse_unsupported(msgspec.json.decode('{"regex":null}', type=GenerateSampling))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"response_format":{"type":"json_object"}}', "response_format 'json_object'"),
        ('{"response_format":{"type":"json_schema","json_schema":{}}}', "'json_schema'"),
        ('{"temperature":2.1}', "temperature must be between 0 and 2, is 2.1"),
        ('{"temperature":-0.1}', "temperature must be between 0 and 2"),
        ('{"suffix":"x"}', "suffix is not supported"),
    ],
)
def test_openai_refuses(raw: str, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        refuse_openai(msgspec.json.decode(raw, type=CompletionBody))


def test_openai_accepts_text_format_and_float32_noise() -> None:
    raw = '{"response_format":{"type":"text"},"temperature":2.000000238}'
    refuse_openai(msgspec.json.decode(raw, type=CompletionBody))


@pytest.mark.parametrize(
    "raw",
    [
        '{"tool_choice":"required"}',
        '{"tool_choice":{"type":"function","function":{"name":"f"}}}',
        '{"function_call":{"name":"f"}}',
        '{"modalities":["text","audio"]}',
        '{"chat_template":"{{ messages }}"}',
        '{"regex":"a+"}',
    ],
)
def test_chat_refuses(raw: str) -> None:
    with pytest.raises(ApiError, match="not supported"):
        refuse_chat(msgspec.json.decode(raw, type=ChatBody))


def test_tools_that_need_not_be_used_are_accepted() -> None:
    raw = '{"tools":[{"type":"function"}],"tool_choice":"auto","parallel_tool_calls":true}'
    refuse_chat(msgspec.json.decode(raw, type=ChatBody))
