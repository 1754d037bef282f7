# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.errors import ModelFileError
from kvferry.engine.gguf_tokenizer import build_backend
from kvferry.engine.loader import load_tokenizer
from kvferry.engine.tokenizer import (
    Tokenizer,
    compile_chat_template,
    folder_chat_template,
    load_backend,
    read_json,
    special_token_texts,
)
from kvferry.tests.engine.checkpoints import copy_tiny, read_data, smollm2_path, tiny_folder


@pytest.fixture(name="smollm2", scope="module")
def _smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_path())


def test_smollm2(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_ids) == (1, (2,))
    assert smollm2.special_ids == frozenset(range(17))
    ids = smollm2.encode("Hello <|im_end|>你好😀")
    assert 2 in ids
    assert smollm2.decode(ids) == "Hello 你好😀"
    assert smollm2.decode(ids, skip_special_tokens=False) == "Hello <|im_end|>你好😀"


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    (prompt,) = (p for p in read_data("smollm2.json")["prompts"] if p["name"] == "english_chat")
    messages = [
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    ]
    text = smollm2.apply_chat_template(messages)
    assert text == prompt["text"]
    assert smollm2.encode(text, add_special_tokens=False) == prompt["ids"]
    assert smollm2.has_chat_template


def test_token_bytes_join_to_the_text(smollm2: Tokenizer) -> None:
    text = "héllo <|im_end|> 你好 😀\n\t 123"
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)).decode() == text


def test_token_bytes_join_to_the_text_of_sentence_piece() -> None:
    tokenizer = _sentence_piece()
    text = "héllo 你好 😀\n\t 123"
    ids = tokenizer.encode(text, add_special_tokens=False)
    # A text starts with a space that only the decoder of a whole text takes away.
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f" {text}"
    assert tokenizer.token_bytes(2) == b"</s>"


def _sentence_piece() -> Tokenizer:
    data = read_data("sentencepiece.json")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.scores": data["scores"],
        "tokenizer.ggml.token_type": data["token_types"],
    }
    return Tokenizer(build_backend(metadata, "test"))


def test_token_text(smollm2: Tokenizer) -> None:
    assert smollm2.token_text(2) == "<|im_end|>"
    (space_word,) = smollm2.encode(" world")
    assert smollm2.token_text(space_word) == " world"
    parts = smollm2.encode("你")
    assert len(parts) > 1
    assert "\ufffd" in smollm2.token_text(parts[-1])


def test_ids_outside_the_vocabulary_give_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([10**6]) == ""
    assert smollm2.token_bytes(10**6) == b""
    assert smollm2.detokenizer().push([10**6]) == ""


def test_text_that_is_not_unicode(smollm2: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode: it holds a lone surrogate"):
        smollm2.encode("\ud800")


def test_no_chat_template() -> None:
    tokenizer = load_tokenizer(tiny_folder("qwen2"))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="the model has no chat template; use a completion"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_chat_template_of_a_folder(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    settings: dict[str, Any] = {
        "bos_token": {"content": "<|begin|>"},
        "eos_token": "<|end|>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert text == "<|begin|>x<|end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (ids[0], ids[-1]) == (256, 257)
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(folder).apply_chat_template([]) == "from the file"


def test_eos_token_of_tokenizer_config_ends_answers_too(tmp_path: Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|begin|>"}')
    assert load_tokenizer(folder).eos_ids == (257, 256)


def test_named_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert folder_chat_template(tmp_path, {"chat_template": named}) == "d"
    assert folder_chat_template(tmp_path, {"chat_template": named[:1]}) is None
    assert folder_chat_template(tmp_path, {}) is None


def test_special_token_texts() -> None:
    settings = {"bos_token": None, "eos_token": "e", "unk_token": {"content": "u"}, "other": "x"}
    assert special_token_texts(settings) == {"eos_token": "e", "unk_token": "u"}


def test_broken_chat_template_turns_chat_off() -> None:
    assert compile_chat_template("{% for %}", {}, "test") is None
    assert compile_chat_template(None, {}, "test") is None
    assert compile_chat_template("x", {}, "test") is not None


def test_tokenizer_json_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="tokenizer.json is missing; copy it from the model"):
        load_backend(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": 3}'])
def test_tokenizer_json_malformed(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFileError, match="tokenizer.json: not a usable tokenizer.json"):
        load_backend(tmp_path / "tokenizer.json")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    value = json.loads((tiny_folder("qwen2") / "tokenizer.json").read_text())
    value["truncation"] = {
        **{"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    }
    value["padding"] = {
        **{"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    assert len(load_backend(tmp_path / "tokenizer.json").encode("abcd").ids) == 4


def test_optional_json(tmp_path: Path) -> None:
    assert read_json(tmp_path / "nothing.json") == {}
    (tmp_path / "bad.json").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="bad.json: not valid JSON"):
        read_json(tmp_path / "bad.json")
