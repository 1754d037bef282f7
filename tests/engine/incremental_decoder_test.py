# SPDX-License-Identifier: Apache-2.0
import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.engine.gguf_header import read_header
from kvferry.engine.gguf_tokenizer import build_backend
from kvferry.engine.incremental_decoder import (
    ByteLevelDecoder,
    IncrementalDecoder,
    WindowDecoder,
)
from kvferry.engine.tokenizer import Tokenizer
from kvferry.tests.engine.checkpoints import read_data, smollm2_path

_VOCAB_SIZES = {"byte_level": 49152, "sentence_piece": 700}


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    if kind == "byte_level":
        return Tokenizer(build_backend(read_header(smollm2_path()).metadata, kind))
    data = read_data("sentencepiece.json")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.scores": data["scores"],
        "tokenizer.ggml.token_type": data["token_types"],
        "tokenizer.ggml.bos_token_id": 1,
    }
    return Tokenizer(build_backend(metadata, kind))


def _pieces(decoder: IncrementalDecoder, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Pushes the ids in groups of the given sizes, repeated, and flushes."""
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(decoder.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, decoder.flush()]


_SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", _VOCAB_SIZES)
@given(data=st.data(), sizes=_SIZES, skip=st.booleans())
def test_pieces_of_any_tokens_join_to_the_whole(
    kind: str, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer = _tokenizer(kind)
    # Small ids are the special and the byte tokens, which are the hard part.
    ids = data.draw(
        st.lists(st.one_of(st.integers(0, 300), st.integers(0, _VOCAB_SIZES[kind] - 1)))
    )
    pieces = _pieces(tokenizer.detokenizer(skip), ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_skipped_token_does_not_end_a_run_of_bytes() -> None:
    tokenizer = _tokenizer("sentence_piece")
    ids = [4, 0, 132, 10**6, 132]  # <0x00>, <unk>, <0x80>, no token, <0x80>
    pieces = _pieces(tokenizer.detokenizer(), ids, [1])
    assert "".join(pieces) == tokenizer.decode(ids) == "\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("kind", _VOCAB_SIZES)
@given(text=st.text(), sizes=_SIZES)
def test_no_piece_of_a_text_holds_a_broken_character(
    kind: str, text: str, sizes: list[int]
) -> None:
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    # SmolLM2's vocabulary lacks a few bytes; SentencePiece's mark comes back as a space.
    assume(tokenizer.decode(ids, skip_special_tokens=False) == text)
    pieces = _pieces(tokenizer.detokenizer(False), ids, sizes)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", _VOCAB_SIZES)
def test_text_comes_out_as_soon_as_it_is_certain(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    decoder = tokenizer.detokenizer()
    ids = tokenizer.encode("Day after day of calm sky", add_special_tokens=False)
    for end in range(1, len(ids) + 1):
        piece = decoder.push(ids[end - 1 : end])
        assert piece == tokenizer.decode(ids[:end])[len(tokenizer.decode(ids[: end - 1])) :]


@pytest.mark.parametrize("kind", _VOCAB_SIZES)
def test_incomplete_character_waits_and_is_replaced_at_the_end(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode("😀", add_special_tokens=False)
    decoder = tokenizer.detokenizer()
    while tokenizer.decode(ids).endswith("😀"):
        ids = ids[:-1]
    assert decoder.push(ids) in ("", " ")
    assert "\ufffd" in decoder.flush()
    assert decoder.flush() == ""


def test_context_keeps_the_space_before_the_first_word() -> None:
    """SentencePiece decoders drop the space at the start of a text, not in the middle of one."""
    tokenizer = _tokenizer("sentence_piece")
    ids = tokenizer.encode("Day after day of calm sky")
    for cut in range(1, len(ids)):
        whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
        pieces = _pieces(tokenizer.detokenizer(context=ids[:cut]), ids[cut:], [1])
        assert "".join(pieces) == whole[len(before) :]
    assert "".join(_pieces(tokenizer.detokenizer(), ids[2:], [1])) == tokenizer.decode(ids[2:])


def test_nothing_pushed() -> None:
    for kind in _VOCAB_SIZES:
        decoder = _tokenizer(kind).detokenizer()
        assert decoder.push([]) == ""
        assert decoder.flush() == ""


def _byte(value: int) -> bytes:
    return bytes([value])


def test_byte_level_decoder_replaces_like_the_whole() -> None:
    raw = b"a\xe4\xbd\xa0\xff\xe4\xbdb\xf0\x9f\x98\x80\xf0\x9f"
    decoder = ByteLevelDecoder(_byte)
    pieces = [decoder.push([byte]) for byte in raw]
    assert "".join([*pieces, decoder.flush()]) == raw.decode(errors="replace")
    assert pieces[1] == pieces[2] == "" and pieces[3] == "你"


def _never(_: int) -> bool:
    return False


def test_window_decoder_decodes_a_short_window_only() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join(map(chr, ids))

    decoder = WindowDecoder(decode, _never, _never, context=[])
    text = "x" * 1000
    assert "".join(decoder.push([ord(char)]) for char in text) == text
    assert longest <= 2
