# SPDX-License-Identifier: Apache-2.0
"""Makes the reference data of tests/engine/data with Hugging Face transformers.

The tests compare the engine with an implementation that shares no code with it. Run this in an
environment of its own (the package does not need these libraries), from the repository root:

    python -m venv .venv-oracle
    .venv-oracle/bin/pip install torch transformers accelerate gguf safetensors tokenizers
    make .cache/src/kvferry
    PYTHONPATH=.cache/src .venv-oracle/bin/python tools/make_oracle.py --gguf FILE.gguf

`--only` limits it to some of: smollm2 (the GGUF file loaded by transformers in float32; about ten
minutes on two cores), tiny (random checkpoints of every architecture, written as model folders
with their reference values), rope (frequencies of published configurations), templates (chat
templates). The data in the tree was made with torch 2.13.0 and transformers 5.24.0.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import (
    render_jinja_template,
)

from kvferry.tools.oracle_inputs import (
    MIN_MARGIN,
    ROPE_CONFIGS,
    TEMPLATES,
    TINY_MODELS,
    smollm2_cuts,
    smollm2_texts,
    tiny_prompts,
)

DATA = Path(__file__).resolve().parent.parent / "tests" / "engine" / "data"
TOP, SAMPLED = 64, 256
SEEDS = range(1, 13)


def greedy(model: Any, ids: Sequence[int], steps: int) -> dict[str, Any]:
    """Runs greedy decoding.

    Args:
        model: A transformers causal LM in float32.
        ids: The prompt.
        steps: Tokens to generate; end-of-sequence tokens do not stop it.

    Returns:
        `greedy` (tokens), `margins` (highest logit minus second highest, at each step) and
        `logits` (of the prompt's last position, float32 tensor).
    """
    tokens: list[int] = []
    margins: list[float] = []
    with torch.inference_mode():
        out = model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
        first = out.logits[0, -1].float()
        for step in range(steps):
            logits = out.logits[0, -1].float()
            top = torch.topk(logits, 2)
            tokens.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            if step + 1 < steps:
                last = torch.tensor([[tokens[-1]]])
                out = model(last, past_key_values=out.past_key_values, use_cache=True)
    return {"greedy": tokens, "margins": margins, "logits": first}


def make_smollm2(path: Path) -> None:
    """Writes smollm2.json.

    Args:
        path: The GGUF file.
    """
    folder, name = str(path.parent), path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    backend = tokenizer.backend_tokenizer
    # transformers gives every GGUF BPE vocabulary GPT-2's pre-tokenizer; this model's published
    # tokenizer.json splits digits first.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    sampled = sorted(random.Random(0).sample(range(model.config.vocab_size), SAMPLED))

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text).ids
        return ids

    prompts = []
    candidates = [[prompt] for prompt in smollm2_texts(encode)]
    cuts = (smollm2_cuts(encode, seed) for seed in SEEDS)
    candidates += [list(alternatives) for alternatives in zip(*cuts, strict=True)]
    for alternatives in candidates:
        for prompt in alternatives:
            result = greedy(model, prompt.ids, prompt.steps)
            margin = min(result["margins"])
            print(f"{prompt.name}: {len(prompt.ids)} tokens, smallest margin {margin:.4f}")
            if margin >= MIN_MARGIN:
                break
        else:
            raise ValueError(f"{prompt.name}: two logits too close; change the prompt")
        top = torch.topk(result["logits"], TOP)
        prompts.append(
            {
                "name": prompt.name,
                "text": prompt.text,
                "ids": prompt.ids,
                "greedy": result["greedy"],
                "margins": _rounded(result["margins"]),
                "top_ids": top.indices.tolist(),
                "top_values": _rounded(top.values.tolist()),
                "sampled_values": _rounded(result["logits"][sampled].tolist()),
            }
        )
    _write(DATA / "smollm2.json", {"sampled_ids": sampled, "prompts": prompts})


def make_tiny() -> None:
    """Writes one model folder with oracle.json for each entry of TINY_MODELS."""
    for spec in TINY_MODELS:
        folder = DATA / "tiny" / spec.name
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(spec.seed)
        config_class = getattr(transformers, spec.config_class)
        config = config_class(**spec.settings, bos_token_id=256, eos_token_id=257)
        model = getattr(transformers, spec.architecture)(config).float().eval()
        dtype = getattr(torch, spec.dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                values = torch.randn_like(parameter) * spec.scale
                if "norm" in name:
                    values = 1.0 + 0.3 * torch.randn_like(parameter)
                # The stored precision, so that a float32 reader sees exactly these values.
                parameter.copy_(values.to(dtype).float())
        _save_checkpoint(folder, model, spec, dtype)
        cases = []
        for ids in tiny_prompts(config.vocab_size):
            result = greedy(model, ids, steps=24)
            cases.append(
                {
                    "ids": ids,
                    "greedy": result["greedy"],
                    "margins": _rounded(result["margins"]),
                    "logits": _rounded(result["logits"].tolist()),
                }
            )
        smallest = min(margin for case in cases for margin in case["margins"])
        print(f"{spec.name}: smallest margin {smallest:.4f}")
        _write(folder / "oracle.json", {"cases": cases})


def _save_checkpoint(folder: Path, model: Any, spec: Any, dtype: Any) -> None:
    # config.json in the form that published checkpoints have, with rope_scaling and rope_theta
    # on top (transformers 5 would write rope_parameters; both forms are read).
    config = {"architectures": [spec.architecture], "model_type": model.config.model_type}
    config |= {key: value for key, value in spec.settings.items() if key != "rope_parameters"}
    rope = dict(spec.settings["rope_parameters"])
    if spec.old_rope_form:
        config["rope_theta"] = rope.pop("rope_theta")
        if rope["rope_type"] != "default":
            config["rope_scaling"] = rope
    else:
        config["rope_parameters"] = rope
    config |= {"bos_token_id": 256, "eos_token_id": 257, "torch_dtype": spec.dtype}
    _write(folder / "config.json", config, indent=1)
    state = {name: value.to(dtype).contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name in spec.unused_tensors:
        state[name] = torch.ones(model.config.head_dim // 2, dtype=dtype)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    if spec.shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_shards(folder, state, spec.shards)
    byte_tokenizer(model.config.vocab_size).save(str(folder / "tokenizer.json"), pretty=False)


def _save_shards(folder: Path, state: dict[str, Any], count: int) -> None:
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = {name: state[name] for name in names[shard::count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(value.numel() * value.element_size() for value in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    _write(folder / "model.safetensors.index.json", index, indent=1)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a byte-level tokenizer without merges: ids 0-255 are bytes, 256 and 257 special.

    Args:
        vocab_size: Size of the model's vocabulary; the rest is filled with unused tokens.

    Returns:
        The tokenizer.
    """
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = ["<|begin|>", "<|end|>"]
    vocab |= {token: len(vocab) + i for i, token in enumerate(special)}
    vocab |= {f"<|unused_{i}|>": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def make_rope() -> None:
    """Writes rope.json: frequencies and attention factor of each of ROPE_CONFIGS."""
    cases = []
    for settings in ROPE_CONFIGS:
        config = transformers.LlamaConfig(**settings)
        embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cases.append(
            {
                "config": settings,
                "head_dim": config.head_dim,
                "inv_freq": [float(value) for value in embedding.inv_freq],
                "attention_factor": float(embedding.attention_scaling),
            }
        )
    _write(DATA / "rope.json", {"cases": cases})


def make_templates() -> None:
    """Writes chat_templates.json: what transformers renders, or that it refuses."""
    cases = []
    for case in TEMPLATES:
        expected, fails = None, False
        try:
            rendered, _ = render_jinja_template(
                conversations=[case["messages"]],
                chat_template=case["template"],
                add_generation_prompt=case["add_generation_prompt"],
                **case["variables"],
            )
            expected = rendered[0]
        except Exception as error:  # whatever a template raises
            print(f"{case['name']}: {type(error).__name__}: {error}")
            fails = True
        cases.append({**case, "expected": expected, "fails": fails})
    _write(DATA / "chat_templates.json", {"cases": cases}, indent=1)


def _rounded(values: Sequence[float]) -> list[float]:
    """Keeps seven significant digits, about what float32 has."""
    return [float(f"{value:.7g}") for value in values]


def _write(path: Path, value: Any, indent: int | None = None) -> None:
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path} ({path.stat().st_size} bytes)")


def main() -> None:
    """Parses the command line and writes the files."""
    makers = ("smollm2", "tiny", "rope", "templates")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--only", nargs="+", choices=makers, default=makers)
    arguments = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    if "smollm2" in arguments.only:
        if arguments.gguf is None:
            parser.error("smollm2 needs --gguf")
        make_smollm2(arguments.gguf)
    if "tiny" in arguments.only:
        make_tiny()
    if "rope" in arguments.only:
        make_rope()
    if "templates" in arguments.only:
        make_templates()


if __name__ == "__main__":
    main()
