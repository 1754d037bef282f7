# SPDX-License-Identifier: Apache-2.0
"""JSON that grows at its end.

SGLang's streams repeat the whole answer in every event. Encoding only what is new and copying the
rest keeps the cost of an event small for long answers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class JsonText:
    """A JSON string that grows."""

    def __init__(self) -> None:
        self._encoded = bytearray(b'"')

    def append(self, text: str) -> None:
        """Adds text at the end.

        Args:
          text: the text, not encoded.
        """
        self._encoded += msgspec.json.encode(text)[1:-1]

    def raw(self) -> msgspec.Raw:
        """Returns the string so far, to be embedded in a document."""
        return msgspec.Raw(bytes(self._encoded) + b'"')


class JsonList:
    """A JSON array that grows."""

    def __init__(self) -> None:
        self._encoded = bytearray(b"[")

    def append(self, item: Any) -> None:
        """Adds an item at the end.

        Args:
          item: anything msgspec encodes.
        """
        if len(self._encoded) > 1:
            self._encoded += b","
        self._encoded += msgspec.json.encode(item)

    def raw(self) -> msgspec.Raw:
        """Returns the array so far, to be embedded in a document."""
        return msgspec.Raw(bytes(self._encoded) + b"]")
