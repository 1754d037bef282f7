# SPDX-License-Identifier: Apache-2.0
"""Typed reads from parsed JSON, with errors that name the key and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from kvferry.engine.errors import ModelError


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether a JSON value is an integer (JSON booleans are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def size(config: Mapping[str, Any], key: str) -> int:
    """Reads a required positive integer.

    Args:
        config: The parsed config.json.
        key: Its key.

    Returns:
        The value.

    Raises:
        ModelError: The key is absent or its value is not a positive integer.
    """
    if key not in config:
        raise ModelError(f"config.json lacks {key!r}")
    value = config[key]
    if not is_int(value) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def number(value: object, name: str) -> float:
    """Checks that a JSON value is a number.

    Args:
        value: The JSON value.
        name: Name of the field, for the error.

    Returns:
        The value as a float.

    Raises:
        ModelError: The value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"config.json: {name} must be a number, got {value!r}")
    return float(value)


def token_ids(value: object, name: str) -> tuple[int, ...]:
    """Normalises a token id field that may be null, one id or a list.

    Args:
        value: The JSON value.
        name: Name of the field, for the error.

    Returns:
        The ids in order, without repeats.

    Raises:
        ModelError: The value is none of these, or an id is negative.
    """
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    for item in values:
        if not is_int(item) or item < 0:
            raise ModelError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(values))
