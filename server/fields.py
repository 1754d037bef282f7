# SPDX-License-Identifier: Apache-2.0
"""Small conversions from decoded JSON to what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvferry.server.errors import ApiError
from kvferry.server.schemas import Number

ItemT = TypeVar("ItemT")


def whole(name: str, value: Number | None) -> int | None:
    """Turns a JSON number into an int.

    Args:
      name: name of the field, for the message.
      value: an int, a float without a fraction (a router may have rewritten `3` as `3.0`), or None.

    Returns:
      The int, or None.

    Raises:
      ApiError: 400 if the value has a fraction or more than 64 bits.
    """
    if value is None:
        return None
    if abs(value) >= 1 << 64:
        raise ApiError(f"{name} is out of range: it has more than 64 bits")
    if isinstance(value, float) and not value.is_integer():
        raise ApiError(f"{name} must be a whole number, is {value}")
    return int(value)


def at_least(name: str, value: Number | None, lowest: int) -> int | None:
    """Turns a JSON number into an int with a lower bound.

    Args:
      name: name of the field, for the message.
      value: the number, or None.
      lowest: smallest accepted value.

    Returns:
      The int, or None.

    Raises:
      ApiError: 400 if the value has a fraction or is below `lowest`.
    """
    number = whole(name, value)
    if number is not None and number < lowest:
        raise ApiError(f"{name} must be at least {lowest}, is {number}")
    return number


def whole_list(name: str, values: Sequence[Number]) -> tuple[int, ...]:
    """Turns JSON numbers into ints.

    Args:
      name: name of the field, for the message.
      values: ints, or floats without a fraction.

    Returns:
      The ints.

    Raises:
      ApiError: 400 if a value has a fraction.
    """
    numbers = [whole(f"{name}[{i}]", value) for i, value in enumerate(values)]
    return tuple(number for number in numbers if number is not None)


def per_item(
    name: str, value: ItemT | list[ItemT] | None, count: int, default: ItemT
) -> list[ItemT]:
    """Spreads a field that may be given once or once per prompt.

    Args:
      name: name of the field, for the message.
      value: one value for all prompts, or a list with one each, or None.
      count: number of prompts.
      default: used for all prompts when the value is None.

    Returns:
      `count` values.

    Raises:
      ApiError: 400 if a list has another length than `count`.
    """
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(f"{name} has {len(value)} items for {count} prompts; give one for each")
    return list(value)
