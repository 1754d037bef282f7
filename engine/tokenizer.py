# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, on Hugging Face `tokenizers`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from absl import logging

from kvferry.engine.chat_template import ChatTemplate
from kvferry.engine.errors import ModelFileError
from kvferry.engine.incremental_decoder import (
    ByteLevelDecoder,
    IncrementalDecoder,
    WindowDecoder,
)

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SPACE_MARK = "\u2581"  # SentencePiece writes it for a space


class Tokenizer:
    """The tokenizer of one model, with its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Wraps a `tokenizers` tokenizer.

        Args:
            backend: The tokenizer itself.
            bos_id: Token that starts a sequence, or None.
            eos_ids: Tokens that end an answer.
            chat_template: The model's chat template, or None.
        """
        self._backend = backend
        self._chat_template = chat_template
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = _is_byte_level(backend)
        # Bound here rather than as module state: the caches go away with the tokenizer.
        self._bytes_of = functools.lru_cache(maxsize=None)(self._token_bytes)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out of text."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenises a text.

        Args:
            text: Any text; special tokens written in it become those tokens.
            add_special_tokens: Whether to add what the model expects around a text (often a
                beginning-of-sequence token). False for a rendered chat template.

        Returns:
            The token ids.

        Raises:
            ValueError: The text holds a lone surrogate and so is not Unicode.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # the library's word for a string that has no UTF-8
            raise ValueError("the text is not valid Unicode: it holds a lone surrogate") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of some tokens; ids outside the vocabulary give no text.

        Args:
            ids: Token ids, not negative.
            skip_special_tokens: Whether special tokens are left out.

        Returns:
            The text; bytes that are not UTF-8 become U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token stands for, special or not.

        Args:
            token_id: Token id; one outside the vocabulary gives no bytes.

        Returns:
            UTF-8, possibly a part of a character.
        """
        return self._bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, special or not; partial characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders a conversation with the model's chat template.

        Args:
            messages: The conversation, oldest first.
            add_generation_prompt: Whether the text ends with the header of an answer.
            **variables: Further template variables (`tools`, `enable_thinking`, ...).

        Returns:
            The prompt, to be encoded with add_special_tokens=False.

        Raises:
            ValueError: The model has no chat template, or it fails on these messages.
        """
        if self._chat_template is None:
            raise ValueError("the model has no chat template; use a completion endpoint instead")
        return self._chat_template.render(messages, add_generation_prompt, **variables)

    def detokenizer(
        self, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> IncrementalDecoder:
        """Starts decoding a growing list of tokens.

        Args:
            skip_special_tokens: Whether special tokens are left out.
            context: The tokens just before (the end of the prompt). SentencePiece vocabularies
                drop the space before a text's first word; with a context it is kept.

        Returns:
            A decoder whose pieces, joined, equal `decode` of all the tokens (with a context: the
            part of `decode` that follows the context's).
        """
        skipped: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        if self._byte_level:
            return ByteLevelDecoder(lambda i: b"" if i in skipped else self._bytes_of(i))
        token_of = self._backend.id_to_token
        return WindowDecoder(
            decode=functools.partial(self.decode, skip_special_tokens=skip_special_tokens),
            is_byte=lambda i: _byte_of(token_of(i)) is not None,
            is_skipped=lambda i: i in skipped or token_of(i) is None,
            context=context[-8:],
        )

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_alphabet()
            values = [table.get(char) for char in token]
            # The library does the same: a token with any other character is plain text.
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        byte = _byte_of(token)
        if byte is not None:
            return bytes([byte])
        if token_id in self._special_ids:
            return token.encode()
        return token.replace(_SPACE_MARK, " ").encode()


def load_backend(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer.json.

    Args:
        path: The file.

    Returns:
        The tokenizer, with truncation and padding off.

    Raises:
        ModelFileError: The file is missing or is not a tokenizer.json.
    """
    if not path.is_file():
        raise ModelFileError(
            f"{path.parent}: tokenizer.json is missing; copy it from the model's repository (a "
            "tokenizer.model alone can be converted with transformers' AutoTokenizer)"
        )
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: not a usable tokenizer.json: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(path: Path) -> dict[str, Any]:
    """Reads an optional JSON object.

    Args:
        path: The file; a missing one counts as empty.

    Returns:
        The object.

    Raises:
        ModelFileError: The file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def special_token_texts(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a tokenizer_config.json, as chat templates name them."""
    texts = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = tokenizer_config.get(key)
        if isinstance(value, Mapping):  # the long form of an added token
            value = value.get("content")
        if isinstance(value, str):
            texts[key] = value
    return texts


def folder_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Finds the chat template of a model folder.

    Args:
        folder: The model folder.
        tokenizer_config: Its parsed tokenizer_config.json.

    Returns:
        Jinja source from chat_template.jinja or else from tokenizer_config.json (of several named
        templates the one named `default`), or None.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def compile_chat_template(
    source: str | None, special_tokens: Mapping[str, str], where: str
) -> ChatTemplate | None:
    """Compiles a model's chat template, if it has a usable one.

    Args:
        source: Jinja source, or None.
        special_tokens: Variables such as `bos_token`.
        where: The model, for the log.

    Returns:
        The template; None when there is none or when it does not compile, which is logged: the
        model still serves completions.
    """
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except ValueError as error:
        logging.warning("%s: chat is off: %s", where, error)
        return None


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return isinstance(backend.decoder, tokenizers.decoders.ByteLevel)


def _byte_of(token: str | None) -> int | None:
    """Returns the byte that a byte-fallback token (`<0xE4>`) stands for, or None."""
    if token is None or len(token) != 6 or not (token.startswith("<0x") and token[-1] == ">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE (GPT-2's bytes_to_unicode).

    Printable Latin-1 characters stand for themselves, the other bytes for the characters from
    U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + position): byte for position, byte in enumerate(shifted)}
    return table
