# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from kvferry.engine.errors import ModelFileError, UnsupportedModelError
from kvferry.engine.gguf_header import read_header
from kvferry.engine.gguf_tokenizer import build_backend
from kvferry.tests.engine.checkpoints import byte_vocabulary, read_data, smollm2_path

_CASES: list[dict[str, Any]] = read_data("smollm2_tokens.json")["cases"]
_TEXTS = [case["text"] for case in _CASES]
_SPECIAL = ["<|begin|>", "<|end|>"]

# The settings of the published tokenizer.json files of Llama 3.1, of Qwen2 to Qwen3, and of GPT-2.
_LLAMA3_SPLIT = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_QWEN_SPLIT = _LLAMA3_SPLIT.replace("\\p{N}{1,3}", "\\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-bpe": {"pre_tokenizer": _split(_LLAMA3_SPLIT), "ignore_merges": True},
    "qwen2": {"pre_tokenizer": _split(_QWEN_SPLIT), "normalizer": {"type": "NFC"}},
    "gpt-2": {"pre_tokenizer": _byte_level(use_regex=True)},
    "smollm": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _byte_level(use_regex=True),
            ],
        }
    },
}


def _published(pre: str) -> tokenizers.Tokenizer:
    """Trains a small vocabulary for a pre-tokenizer; returns it as a tokenizer.json would be."""
    settings = _PUBLISHED[pre]
    trained = tokenizers.Tokenizer(models.BPE())
    skeleton = json.loads(trained.to_str())
    skeleton["pre_tokenizer"] = settings["pre_tokenizer"]
    trained = tokenizers.Tokenizer.from_str(json.dumps(skeleton))
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(_TEXTS * 2, trainer)
    value = json.loads(trained.to_str())
    vocab = value["model"]["vocab"]
    # A word that no merges lead to: found only where merges are ignored for whole words.
    vocab["Ġkebab"] = len(vocab)
    value["model"]["ignore_merges"] = settings.get("ignore_merges", False)
    value["normalizer"] = settings.get("normalizer")
    value["decoder"] = _byte_level(use_regex=True)
    value["added_tokens"] = [
        {
            "id": len(vocab) + i,
            "content": token,
            **{"single_word": False, "lstrip": False, "rstrip": False},
            **{"normalized": False, "special": special},
        }
        for i, (token, special) in enumerate([(_SPECIAL[0], True), (_SPECIAL[1], True)])
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(value))


def _as_metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    value = json.loads(backend.to_str())
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in _SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in value["model"]["merges"]],
    }


@pytest.mark.parametrize("pre", _PUBLISHED)
def test_pre_tokenizers(pre: str) -> None:
    published = _published(pre)
    backend = build_backend(_as_metadata(published, pre), "test")
    texts = [*_TEXTS, "a kebab <|begin|> kebab<|end|>x"]
    for text in texts:
        expected = published.encode(text).ids
        assert backend.encode(text).ids == expected, text
        for skip in (True, False):
            decoded = published.decode(expected, skip_special_tokens=skip)
            assert backend.decode(expected, skip_special_tokens=skip) == decoded
    whole_word = published.token_to_id("Ġkebab") in published.encode(" kebab").ids
    assert whole_word == (pre == "llama-bpe")


@pytest.mark.parametrize("alias", ["llama3", "llama-v3", "deepseek-r1-qwen"])
def test_aliases(alias: str) -> None:
    pre = "qwen2" if alias == "deepseek-r1-qwen" else "llama-bpe"
    published = _published(pre)
    backend = build_backend(_as_metadata(published, alias), "test")
    for text in _TEXTS:
        assert backend.encode(text).ids == published.encode(text).ids


def test_smollm2_gives_the_ids_of_llama_cpp() -> None:
    backend = build_backend(read_header(smollm2_path()).metadata, "smollm2")
    for case in _CASES:
        assert backend.encode(case["text"]).ids == case["ids"], case["text"]
        # Everything but special tokens survives the round trip.
        assert backend.decode(case["ids"], skip_special_tokens=False) == case["text"]


def _sentence_piece(**changes: Any) -> dict[str, Any]:
    data = read_data("sentencepiece.json")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.scores": data["scores"],
        "tokenizer.ggml.token_type": data["token_types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_sentence_piece_gives_the_ids_of_sentence_piece() -> None:
    backend = build_backend(_sentence_piece(), "test")
    cases = read_data("sentencepiece.json")["cases"]
    assert len(cases) > 100
    for case in cases:
        assert backend.encode(case["text"]).ids == case["ids"], case["text"]
        # The mark that stands for a space cannot itself be told from one.
        assert backend.decode(case["ids"]) == case["text"].replace("\u2581", " ")


def test_sentence_piece_special_tokens_inside_a_text() -> None:
    backend = build_backend(_sentence_piece(), "test")
    ids = backend.encode("<s>a</s><tool>").ids
    assert ids[:2] == [1, 1] and ids[-2:] == [2, 3]
    assert backend.decode(ids) == "a<tool>"


def test_sentence_piece_without_the_space_in_front() -> None:
    data = read_data("sentencepiece.json")
    backend = build_backend(_sentence_piece(add_space_prefix=False, add_bos_token=False), "test")
    ids = backend.encode("or").ids
    assert ids == [data["tokens"].index("or")]
    assert backend.decode(ids) == "or"
    assert backend.decode(backend.encode(" or").ids) == " or"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [256]),
        ({"add_eos_token": True}, [257]),
        ({"add_bos_token": True, "add_eos_token": True}, [256, 257]),
        ({"pre": "llama-bpe"}, [256]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ],
)
def test_tokens_added_around_a_text(changes: dict[str, Any], expected: list[int]) -> None:
    metadata = byte_vocabulary() | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    backend = build_backend(metadata, "test")
    assert [i for i in backend.encode("ab").ids if i >= 256] == expected
    assert (
        backend.encode("ab", add_special_tokens=False).ids
        == backend.encode("ab").ids[len(expected) and expected[0] == 256 :][:2]
    )


def test_unnamed_pre_tokenizer_is_gpt2(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_vocabulary()
    named = build_backend(metadata, "test")
    del metadata["tokenizer.ggml.pre"]
    unnamed = build_backend(metadata, "test")
    assert unnamed.encode("Hello 12345").ids == named.encode("Hello 12345").ids


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModelError, "tokenizer model 'bert' is not supported; put"),
        ({"model": None}, UnsupportedModelError, "tokenizer model None is not supported"),
        ({"pre": "tekken"}, UnsupportedModelError, "pre-tokenizer 'tekken' is not supported"),
        ({"tokens": []}, ModelFileError, "holds no vocabulary; put the model's tokenizer.json"),
        ({"merges": None}, ModelFileError, "metadata lacks 'tokenizer.ggml.merges'"),
        ({"merges": ["a zz"]}, ModelFileError, "merge 'a zz' uses a token that is not in"),
        ({"merges": ["a b"]}, ModelFileError, "merge 'a b' uses a token that is not in"),
    ],
)
def test_bad_metadata(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    metadata = byte_vocabulary() | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    with pytest.raises(error, match=message):
        build_backend(metadata, "test")


def test_sentence_piece_without_scores() -> None:
    with pytest.raises(ModelFileError, match="scores and tokenizer.ggml.token_type must have one"):
        build_backend(_sentence_piece(scores=None), "test")
