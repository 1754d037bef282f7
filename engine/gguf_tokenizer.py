# SPDX-License-Identifier: Apache-2.0
"""Builds a tokenizer from the metadata of a GGUF file.

GGUF stores the vocabulary and names the rest: `tokenizer.ggml.model` says which algorithm,
`tokenizer.ggml.pre` which pre-tokenizer. The pre-tokenizers below are those of the models'
published tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from absl import logging
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kvferry.engine.errors import ModelFileError, UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_NORMAL = 1
_BESIDE = "put the model's tokenizer.json beside the .gguf file to use it instead"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_SPLIT_QWEN2 = rf"{_WORD}|\p{{N}}|{_REST}"
_GPT2, _LLAMA3, _QWEN2, _SMOLLM = "gpt-2", "llama-bpe", "qwen2", "smollm"
_PRE_TOKENIZERS: Mapping[str, str] = {
    **{"gpt-2": _GPT2, "default": _GPT2},
    **{"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3},
    **{"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "smollm": _SMOLLM},
}


def build_backend(metadata: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        metadata: The metadata of the file.
        where: The file, for errors.

    Returns:
        The tokenizer.

    Raises:
        UnsupportedModelError: The algorithm or the pre-tokenizer is not known; named.
        ModelFileError: The vocabulary is missing or contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelFileError(f"{where}: the file holds no vocabulary; {_BESIDE}")
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    if kind == "gpt2":
        backend = _byte_level(metadata, vocab, where)
    elif kind == "llama":
        backend = _sentence_piece(metadata, vocab, where)
    else:
        raise UnsupportedModelError(
            f"{where}: tokenizer model {kind!r} is not supported; {_BESIDE}"
        )
    _add_tokens(backend, metadata, tokens)
    return backend


def _byte_level(
    metadata: Mapping[str, Any], vocab: dict[str, int], where: str
) -> tokenizers.Tokenizer:
    named = metadata.get("tokenizer.ggml.pre", "default")
    if named not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{where}: pre-tokenizer {named!r} is not supported; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}; {_BESIDE}"
        )
    if named == "default":
        logging.warning("%s: names no pre-tokenizer, GPT-2's is used; %s", where, _BESIDE)
    pre = _PRE_TOKENIZERS[named]
    model = models.BPE(
        vocab=vocab, merges=_listed_merges(metadata, vocab, where), ignore_merges=pre == _LLAMA3
    )
    backend = tokenizers.Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == _GPT2:
        backend.pre_tokenizer = byte_level
    elif pre == _SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        pattern = Regex(_SPLIT_LLAMA3 if pre == _LLAMA3 else _SPLIT_QWEN2)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, raw_byte_level])
    if pre == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _add_bos_eos(backend, metadata, vocab, add_bos=pre == _LLAMA3)
    return backend


def _sentence_piece(metadata: Mapping[str, Any], vocab: dict[str, int], where: str) -> Any:
    scores = metadata.get("tokenizer.ggml.scores")
    types = metadata.get("tokenizer.ggml.token_type")
    if scores is None or types is None or not len(scores) == len(types) == len(vocab):
        raise ModelFileError(
            f"{where}: tokenizer.ggml.scores and tokenizer.ggml.token_type must have one entry "
            f"for each of the {len(vocab)} distinct tokens; {_BESIDE}"
        )
    unknown = [token for token, i in vocab.items() if types[i] == _UNKNOWN]
    if "tokenizer.ggml.merges" in metadata:
        merges = _listed_merges(metadata, vocab, where)
    else:
        merges = _scored_merges(vocab, scores, types)
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_bos_eos(backend, metadata, vocab, add_bos=True)
    return backend


def _listed_merges(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], where: str
) -> list[tuple[str, str]]:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise ModelFileError(f"{where}: metadata lacks 'tokenizer.ggml.merges'; {_BESIDE}")
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(
                f"{where}: merge {line!r} uses a token that is not in the vocabulary; {_BESIDE}"
            )
        merges.append((left, right))
    return merges


def _scored_merges(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Derives merges from SentencePiece scores: a higher score is merged earlier."""
    ranked = []
    for token, token_id in vocab.items():
        if types[token_id] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-float(scores[token_id]), token_id, left, right, token, cut))
    ranked.sort()
    return [(token[:cut], token[cut:]) for *_, token, cut in ranked]


def _add_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]
) -> None:
    """Registers the tokens that are matched as a whole in the text."""
    types = metadata.get("tokenizer.ggml.token_type", ())
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_bos_eos(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    vocab: Mapping[str, int],
    add_bos: bool,
) -> None:
    """Sets what is added around a text; `add_bos` is the default where the file is silent."""
    by_id = {token_id: token for token, token_id in vocab.items()}
    before: list[tuple[str, int]] = []
    after: list[tuple[str, int]] = []
    for name, default, place in (("bos", add_bos, before), ("eos", False, after)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) and token_id in by_id:
            place.append((by_id[token_id], token_id))
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not before and not after:
        backend.post_processor = byte_level
        return
    texts = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
    template = processors.TemplateProcessing(single=texts, special_tokens=[*before, *after])
    backend.post_processor = template
