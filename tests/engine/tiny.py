# SPDX-License-Identifier: Apache-2.0
"""A model small enough to compile and run in a test: random weights, a byte-level vocabulary."""

import functools
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvferry.engine.loader import LoadedModel
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.rope import RopeConfig
from kvferry.engine.runner import ModelRunner
from kvferry.engine.runner_options import RunnerOptions
from kvferry.engine.sharding import param_shapes
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights import Params

BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 288
PAGE_SIZE = 4
CHUNK_TOKENS = 32
MAX_CONTEXT = 128


def tiny_config(**overrides: Any) -> ModelConfig:
    """Returns a two-layer Llama; keyword arguments replace fields of it."""
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "max_context": MAX_CONTEXT,
        "bos_id": BOS_ID,
        "eos_ids": (EOS_ID,),
    }
    return ModelConfig(**fields | overrides)


def tiny_params(config: ModelConfig, seed: int = 0) -> Params:
    """Returns random weights, large enough for answers that wander about."""
    rng = np.random.default_rng(seed)

    def draw(shape: jax.ShapeDtypeStruct) -> npt.NDArray[np.float32]:
        if len(shape.shape) == 1:
            return rng.uniform(0.5, 1.5, shape.shape).astype(np.float32)
        return rng.normal(0.0, 3.0 / np.sqrt(shape.shape[0]), shape.shape).astype(np.float32)

    params: Params = jax.tree.map(draw, param_shapes(config, np.float32))
    return params


def tiny_tokenizer() -> Tokenizer:
    """Returns a tokenizer of single bytes (ids 0-255, in byte order) and a few merges."""
    byte_of = {char: byte for byte, char in _byte_characters().items()}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ã", "©")]
    vocabulary = byte_of | {"<bos>": BOS_ID, "<eos>": EOS_ID}
    vocabulary |= {a + b: EOS_ID + 1 + index for index, (a, b) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    return Tokenizer(backend, bos_id=BOS_ID, eos_ids=(EOS_ID,))


def tiny_model(seed: int = 0, **overrides: Any) -> LoadedModel:
    """Returns the whole model."""
    config = tiny_config(**overrides)
    return LoadedModel(
        config=config,
        params=tiny_params(config, seed),
        tokenizer=tiny_tokenizer(),
        fingerprint=f"{seed:064x}",
        name="tiny",
    )


def tiny_runner(model: LoadedModel | None = None, **options: Any) -> ModelRunner:
    """Returns a runner for the model with a small pool; keyword arguments are its options."""
    chosen: dict[str, Any] = {
        "max_running_requests": 4,
        "chunk_tokens": CHUNK_TOKENS,
        "max_prefill_sequences": 3,
        "page_size": PAGE_SIZE,
        "num_pages": 64,
    }
    return ModelRunner(model or tiny_model(), RunnerOptions(**chosen | options))


@functools.cache
def _byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + index) for index, byte in enumerate(others)}
