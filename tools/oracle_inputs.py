# SPDX-License-Identifier: Apache-2.0
"""Inputs of make_oracle.py: prompts, tiny model shapes, RoPE configurations, chat templates."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

PAGE, CHUNK, CONTEXT = 16, 512, 8192
STEPS, STEPS_NEAR_LIMIT = 32, 8
# A prompt whose two highest logits come closer than this at some step is no reference for tokens.
MIN_MARGIN = 0.003


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One SmolLM2 prompt.

    Attributes:
        name: What it is there for.
        text: Its text; None where it was cut to a number of tokens.
        ids: Its tokens.
        steps: Tokens to generate.
    """

    name: str
    text: str | None
    ids: list[int]
    steps: int = STEPS


def _chat(*turns: tuple[str, str]) -> str:
    head = (
        ""
        if turns[0][0] == "system"
        else (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n"
        )
    )
    body = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{head}{body}<|im_start|>assistant\n"


_TEXTS = {
    "english_chat": _chat(("user", "What is the capital of France? Answer in one sentence.")),
    "english_system_chat": _chat(
        ("system", "You answer like a pirate."),
        ("user", "How far away is the moon?"),
        ("assistant", "Arr, she be sailing some 384,400 kilometres from the deck, matey!"),
        ("user", "And how long would a ship need to get there?"),
    ),
    "english_prose": (
        "The lighthouse keeper had not spoken to anyone for eleven days when the boat came. It "
        "carried flour, lamp oil, a bundle of newspapers tied with string, and a girl of about "
        "nine who said that she was his granddaughter. He looked at her for a long time, and then"
    ),
    "english_list": "Five things to check before a long bicycle tour:\n\n1.",
    "code_python": (
        "def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:\n"
        '    """Merges overlapping closed intervals."""\n'
        "    result: list[tuple[int, int]] = []\n"
        "    for start, end in sorted(intervals):\n"
    ),
    "code_c": (
        "#include <stdio.h>\n\nstatic int gcd(int a, int b)\n{\n\twhile (b != 0) {\n"
        "\t\tint t = a % b;\n"
    ),
    "code_json": '{"name": "kvferry", "license": "Apache-2.0", "scripts": {"test": "pytest"',
    "code_chat": _chat(("user", "Write a bash one-liner that counts the lines of all *.py files.")),
    "chinese": "从前有一座山，山上有一座庙，庙里有一个老和尚在给小和尚讲故事。故事是这样的：",
    "chinese_chat": _chat(("user", "请用中文介绍一下北京的历史。")),
    "emoji": "Weather: Monday ☀️ 24°C, Tuesday 🌧️ 17°C, Wednesday ⛈️ 15°C 👨‍👩‍👧‍👦🏳️‍🌈, Thursday",
    "mixed_scripts": "Hello, здравствуйте, こんにちは, 안녕하세요, مرحبا, नमस्ते, γειά σου,",
    "digits": "3.14159265358979323846 2.71828182845904523536 1.4142135623730950488",
    "whitespace": "\n\n   \t indented \r\n\r\n\ttwo  spaces   three\n\n\n",
    "repetition": "tick tock " * 40,
}


def long_text(seed: int) -> str:
    """Returns about 9000 tokens of a ship's log: varied, reproducible and free of rights."""
    rng = random.Random(seed)
    ports = ["Lisbon", "Bergen", "Tallinn", "Genoa", "Porto", "Riga", "Cork", "Odessa", "Malmo"]
    goods = ["copper", "wool", "salted cod", "timber", "tea", "amber", "paper", "rope", "olives"]
    skies = ["clear", "overcast", "foggy", "stormy", "calm", "hazy", "bright and cold"]
    lines = []
    for day in range(1, 260):
        start, end = rng.sample(ports, 2)
        lines.append(
            f"Day {day}: {rng.choice(skies)} sky. Left {start} for {end} with "
            f"{rng.randint(2, 900)} crates of {rng.choice(goods)}; {rng.choice(goods)} was sold at "
            f"{rng.randint(3, 97)} crowns."
        )
    return "\n".join(lines)


def smollm2_texts(encode: Callable[[str], list[int]]) -> list[Prompt]:
    """Lists the SmolLM2 prompts that are whole texts.

    Args:
        encode: Text to tokens.

    Returns:
        The prompts.
    """
    return [Prompt(name, text, encode(text)) for name, text in _TEXTS.items()]


def smollm2_cuts(encode: Callable[[str], list[int]], seed: int) -> list[Prompt]:
    """Lists SmolLM2 prompts of the lengths at which pages, chunks and the context end.

    Args:
        encode: Text to tokens.
        seed: Of the text that is cut.

    Returns:
        The prompts.
    """
    ids = encode(long_text(seed))
    sizes = {
        **{"one_token": 1, "page-1": PAGE - 1, "page": PAGE, "page+1": PAGE + 1},
        **{"chunk-1": CHUNK - 1, "chunk": CHUNK, "chunk+1": CHUNK + 1},
        "2.5_chunks": 5 * CHUNK // 2,
    }
    prompts = [Prompt(name, None, ids[:size]) for name, size in sizes.items()]
    limit = CONTEXT - STEPS_NEAR_LIMIT
    if len(ids) < limit:
        raise ValueError(f"the long text has {len(ids)} tokens, {limit} are needed")
    prompts.append(Prompt("near_context_limit", None, ids[:limit], STEPS_NEAR_LIMIT))
    return prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModel:
    """One random checkpoint.

    Attributes:
        name: Folder name.
        architecture: transformers class of the model.
        config_class: transformers class of its configuration.
        settings: Arguments of the configuration.
        dtype: Stored type.
        seed: Of the weights.
        scale: Standard deviation of the weights.
        shards: Number of safetensors files.
        old_rope_form: Write rope_theta and rope_scaling instead of rope_parameters.
        unused_tensors: Extra tensors that a reader must leave out.
    """

    name: str
    architecture: str
    config_class: str
    settings: dict[str, Any]
    dtype: str = "bfloat16"
    seed: int = 0
    scale: float = 0.15
    shards: int = 1
    old_rope_form: bool = True
    unused_tensors: tuple[str, ...] = ()


def _sizes(hidden: int, inner: int, q_heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
    }


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

TINY_MODELS = [
    TinyModel(
        name="llama3",
        architecture="LlamaForCausalLM",
        config_class="LlamaConfig",
        settings={
            **_sizes(64, 112, 4, 2, 320),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": _LLAMA3_ROPE,
        },
        shards=2,
    ),
    TinyModel(
        name="llama_bias",
        architecture="LlamaForCausalLM",
        config_class="LlamaConfig",
        settings={
            **_sizes(48, 80, 4, 4, 300),
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
        dtype="float32",
        unused_tensors=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
    TinyModel(
        name="llama_yarn",
        architecture="LlamaForCausalLM",
        config_class="LlamaConfig",
        settings={
            **_sizes(64, 96, 4, 1, 304),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": _YARN_ROPE,
        },
        dtype="float16",
        old_rope_form=False,
    ),
    TinyModel(
        name="mistral",
        architecture="MistralForCausalLM",
        config_class="MistralConfig",
        settings={
            **_sizes(64, 100, 4, 2, 310),
            "head_dim": 24,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    TinyModel(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        config_class="Qwen2Config",
        settings={
            **_sizes(60, 90, 6, 2, 331),
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        dtype="float32",
    ),
    TinyModel(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        config_class="Qwen3Config",
        settings={
            **_sizes(64, 104, 4, 2, 333),
            "head_dim": 24,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
]


def tiny_prompts(vocab_size: int) -> list[list[int]]:
    """Returns random prompts of lengths around the page size, one of them several pages."""
    rng = random.Random(3)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in (1, 5, 15, 16, 17, 100)]


def _rope_case(head_dim: int, context: int, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": head_dim * 2,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_parameters": rope,
    }


_YARN_LARGE = {**_YARN_ROPE, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768}

ROPE_CONFIGS = [
    _rope_case(64, 8192, {"rope_type": "default", "rope_theta": 100000.0}),
    _rope_case(128, 131072, {**_LLAMA3_ROPE, "original_max_position_embeddings": 8192}),
    _rope_case(
        64, 131072, {**_LLAMA3_ROPE, "factor": 32.0, "original_max_position_embeddings": 8192}
    ),
    _rope_case(128, 4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    _rope_case(128, 131072, _YARN_LARGE),
    _rope_case(128, 131072, {**_YARN_LARGE, "attention_factor": 0.75, "truncate": False}),
    _rope_case(
        64,
        131072,
        {
            **_YARN_LARGE,
            **{"beta_fast": 16.0, "beta_slow": 2.0},
            **{"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
            "original_max_position_embeddings": 4096,
        },
    ),
]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_BLOCKS = """{{- bos_token }}
{%- if tools %}
    {{- "Tools: " + tools | tojson }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson(indent=2)) }}
    {%- endfor %}
{%- endif %}
{%- set state = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {%- if message.role == 'assistant' %}
        {% generation %}
A{{ loop.index }}: {{ message.content | trim }}
        {% endgeneration %}
    {%- else %}
U{{ loop.index0 }}: {{ message.content }}
    {%- endif %}
{% endfor %}
{{- state.count }}
{%- if enable_thinking is defined and enable_thinking is false %}no thoughts{% endif %}
"""
_STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('the first message must be from the "
    "user') }}{% endif %}{{ messages[0].content }}"
)
_HELLO = [{"role": "user", "content": "Hello <b>&\n 你好"}]
_TURNS = [
    *({"role": "user", "content": "a"}, {"role": "skip", "content": "b"}),
    *({"role": "assistant", "content": "  c  "}, {"role": "stop", "content": "d"}),
    {"role": "user", "content": "e"},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é> & '\""}}]


def _template(
    name: str, template: str, messages: list[Any], prompt: bool = True, **variables: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "template": template,
        "messages": messages,
        "add_generation_prompt": prompt,
        "variables": variables,
    }


TEMPLATES = [
    _template("chatml", _CHATML, _HELLO),
    _template("chatml without prompt", _CHATML, _HELLO, prompt=False),
    _template("blocks", _BLOCKS, _TURNS, bos_token="<s>"),
    _template("tools", _BLOCKS, _TURNS, bos_token="<s>", tools=_TOOLS, enable_thinking=False),
    _template("refused", _STRICT, [{"role": "system", "content": "x"}]),
    _template("accepted", _STRICT, _HELLO),
    _template("missing key", _CHATML, [{"role": "user"}]),
    _template("wrong type", _CHATML, [{"role": "user", "content": 3}]),
    _template("year", "{{ strftime_now('%%') }}", _HELLO),
    _template("unsafe", "{{ messages.__class__.__mro__[1].__subclasses__() }}", _HELLO),
    _template("mutation", "{{ messages.append(1) }}", _HELLO),
]
