# SPDX-License-Identifier: Apache-2.0
"""The engine against Hugging Face transformers: data/*.json, made by tools/make_oracle.py."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.engine.loader import load_model, load_tokenizer
from kvferry.engine.runner import ModelRunner
from kvferry.engine.runner_options import RunnerOptions
from kvferry.engine.step_inputs import Chunk
from kvferry.tests.engine.checkpoints import (
    TINY_NAMES,
    gguf_tensors,
    llama_metadata,
    read_data,
    smollm2_path,
    tiny_folder,
    write_gguf,
)

PAGE, CHUNK, CONTEXT = 16, 512, 8192
_TOLERANCE = 1e-3
# Below this difference of the two highest logits a step may go either way; none of the data does.
_SMALLEST_MARGIN = 1e-3

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass
class Generation:
    """Greedy tokens, and the logits at the prompt's last position."""

    tokens: list[int]
    logits: Floats


def generate(runner: ModelRunner, ids: Sequence[int], steps: int) -> Generation:
    """Prefills in chunks, then decodes one token at a time, on pages in scattered order."""
    count = -(-(len(ids) + steps) // runner.pool.page_size)
    order = np.random.default_rng(0).permutation(runner.pool.num_pages)
    pages = [int(page) for page in order[:count]]
    chunk = runner.sizes.prefill_tokens[-1]
    for start in range(0, len(ids), chunk):
        result = runner.run([Chunk(list(ids[start : start + chunk]), start, pages)])
    first = np.asarray(result.logits)[0]
    tokens = [int(first.argmax())]
    while len(tokens) < steps:
        position = len(ids) + len(tokens) - 1
        result = runner.run([Chunk([tokens[-1]], position, pages)])
        tokens.append(int(np.asarray(result.logits)[0].argmax()))
    return Generation(tokens, first)


def check(generation: Generation, case: dict[str, Any], ids: Sequence[int], values: Floats) -> None:
    """Compares with the oracle: logits at the vocabulary ids given, and every greedy token."""
    assert min(case["margins"]) > _SMALLEST_MARGIN
    np.testing.assert_allclose(
        generation.logits[list(ids)], values, rtol=_TOLERANCE, atol=_TOLERANCE
    )
    assert generation.tokens == case["greedy"]


def _smollm2() -> dict[str, Any]:
    data: dict[str, Any] = read_data("smollm2.json")
    return data


_PROMPTS = {prompt["name"]: prompt for prompt in _smollm2()["prompts"]}
_LONGEST = "near_context_limit"


@pytest.fixture(name="smollm2", scope="module")
def _smollm2_runner() -> Iterator[ModelRunner]:
    options = RunnerOptions(
        max_running_requests=1, page_size=PAGE, chunk_tokens=CHUNK, num_pages=CONTEXT // PAGE
    )
    yield ModelRunner(load_model(smollm2_path()), options)


def _check_smollm2(runner: ModelRunner, name: str) -> None:
    prompt = _PROMPTS[name]
    generation = generate(runner, prompt["ids"], len(prompt["greedy"]))
    ids = prompt["top_ids"] + _smollm2()["sampled_ids"]
    values = np.array(prompt["top_values"] + prompt["sampled_values"], np.float32)
    check(generation, prompt, ids, values)
    assert float(generation.logits.max()) == generation.logits[prompt["top_ids"][0]]


@pytest.mark.parametrize("name", [name for name in _PROMPTS if name != _LONGEST])
def test_smollm2(smollm2: ModelRunner, name: str) -> None:
    _check_smollm2(smollm2, name)


@pytest.mark.slow
def test_smollm2_near_the_context_limit(smollm2: ModelRunner) -> None:
    prompt = _PROMPTS[_LONGEST]
    assert len(prompt["ids"]) + len(prompt["greedy"]) == CONTEXT
    _check_smollm2(smollm2, _LONGEST)


def test_smollm2_prompts_are_those_that_matter() -> None:
    lengths = {len(prompt["ids"]) for prompt in _PROMPTS.values()}
    assert len(_PROMPTS) >= 20
    assert {1, PAGE - 1, PAGE, PAGE + 1} <= lengths
    assert {CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK // 2} <= lengths


def test_smollm2_prompts_tokenise_to_the_ids_of_the_oracle() -> None:
    tokenizer = load_tokenizer(smollm2_path())
    for prompt in _PROMPTS.values():
        if prompt["text"] is not None:
            assert tokenizer.encode(prompt["text"]) == prompt["ids"]


@functools.cache
def _tiny_runner(path: Path) -> ModelRunner:
    options = RunnerOptions(
        max_running_requests=1, page_size=PAGE, chunk_tokens=32, num_pages=16, max_context=160
    )
    return ModelRunner(load_model(path), options)


def _tiny_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = read_data(f"tiny/{name}/oracle.json")["cases"]
    return cases


def _check_tiny(runner: ModelRunner, case: dict[str, Any]) -> None:
    generation = generate(runner, case["ids"], len(case["greedy"]))
    check(generation, case, range(len(case["logits"])), np.array(case["logits"], np.float32))


@pytest.mark.parametrize("name", TINY_NAMES)
def test_random_checkpoint(name: str) -> None:
    for case in _tiny_cases(name):
        _check_tiny(_tiny_runner(tiny_folder(name)), case)


@pytest.mark.parametrize("name", ["llama_bias", "mistral"])
def test_random_checkpoint_as_gguf(name: str, tmp_path: Path) -> None:
    metadata = llama_metadata(tiny_folder(name))
    metadata[".attention.key_length"] = metadata[".rope.dimension_count"]
    metadata[".attention.value_length"] = metadata[".rope.dimension_count"]
    if name == "llama_bias":
        metadata |= {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0}
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", metadata, gguf_tensors(tiny_folder(name), permute=True))
    for case in _tiny_cases(name):
        _check_tiny(_tiny_runner(path), case)
