# SPDX-License-Identifier: Apache-2.0
"""From a growing list of tokens to text, piece by piece.

A token may end in the middle of a character, so text is held back until the character is whole.
Both decoders keep one promise: the pieces, joined, are the decoding of all the tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class IncrementalDecoder(Protocol):
    """Turns tokens into text as they arrive."""

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is certain by now and was not returned before."""
        ...

    def flush(self) -> str:
        """Returns the text still held back; an incomplete character becomes U+FFFD."""
        ...


class ByteLevelDecoder:
    """For vocabularies whose every token is a string of bytes (GPT-2 style BPE)."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """Starts with no tokens.

        Args:
            token_bytes: The bytes that a token adds to the text; empty for a skipped token.
        """
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; see `IncrementalDecoder.push`."""
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        """Ends the text; see `IncrementalDecoder.flush`."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other vocabulary: decodes a short window of recent tokens again at each step.

    The window starts at tokens whose text is out already; what the decoding of the window has
    beyond theirs is new. A run of byte tokens (`<0xE4>`) is held until it ends: the tokenizers
    library decodes it as a whole, and one bad byte turns every byte of it into U+FFFD.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_byte: Callable[[int], bool],
        is_skipped: Callable[[int], bool],
        context: Sequence[int],
    ) -> None:
        """Starts after `context`.

        Args:
            decode: Decodes a list of tokens at once.
            is_byte: Whether a token stands for one byte.
            is_skipped: Whether `decode` passes over a token; such a one does not end a run.
            context: Tokens that stand before the text and give no text themselves. A decoder
                that drops the space before the first word of a text keeps it after a context.
        """
        self._decode = decode
        self._is_byte = is_byte
        self._is_skipped = is_skipped
        self._window = [i for i in context if not is_skipped(i)]
        self._window_text = decode(self._window)
        self._out = len(self._window)  # tokens of the window whose text is out

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; see `IncrementalDecoder.push`."""
        self._window.extend(i for i in ids if not self._is_skipped(i))
        if not self._window or self._is_byte(self._window[-1]):
            return ""
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Ends the text; see `IncrementalDecoder.flush`."""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._window_text) :]
        # Keep only the tokens of this step as the next window. They must have text: a window
        # without any would make the decoder treat the next token as the first of the text.
        kept = self._window[self._out :]
        kept_text = self._decode(kept)
        if kept_text:
            self._window, self._window_text = kept, kept_text
        else:
            self._window_text = text
        self._out = len(self._window)
        return new
