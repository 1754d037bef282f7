# SPDX-License-Identifier: Apache-2.0
"""Errors as clients see them: four statuses, one body per family of routes.

A router passes 400 and 404 on, retries 500 and 503, and turns every other status into a retried
500. So nothing here answers anything but these four.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ErrorStyle = Literal["sglang", "openai"]

BAD_REQUEST = 400
NOT_FOUND = 404
INTERNAL = 500
UNAVAILABLE = 503

_TYPES = {
    BAD_REQUEST: "BadRequestError",
    NOT_FOUND: "NotFoundError",
    INTERNAL: "InternalServerError",
    UNAVAILABLE: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
      status: HTTP status; one of 400, 404, 500, 503 (see `known_status`).
      message: what was wrong, with which value, and what to do.
    """

    def __init__(self, message: str, status: int = BAD_REQUEST):
        super().__init__(message)
        self.message = message
        self.status = known_status(status)


def known_status(status: int) -> int:
    """Maps any HTTP status to one that a router understands.

    Args:
      status: an HTTP status.

    Returns:
      400, 404, 500 or 503: the status itself, else 400 for a fault of the client, else 500.
    """
    if status in _TYPES:
        return status
    return BAD_REQUEST if 400 <= status < 500 else INTERNAL


def error_object(message: str, status: int) -> dict[str, object]:
    """Returns the error object of the OpenAI API.

    Args:
      message: what was wrong.
      status: one of 400, 404, 500, 503.

    Returns:
      `{"object", "message", "type", "param", "code"}`.
    """
    return {
        "object": "error",
        "message": message,
        "type": _TYPES[known_status(status)],
        "param": None,
        "code": known_status(status),
    }


def error_body(style: ErrorStyle, message: str, status: int) -> bytes:
    """Returns the JSON body of an error answer.

    Args:
      style: "sglang" for `{"error": {"message", "code"}}`, "openai" for the OpenAI error object
        under `error`.
      message: what was wrong.
      status: one of 400, 404, 500, 503.

    Returns:
      UTF-8 JSON.
    """
    if style == "openai":
        return msgspec.json.encode({"error": error_object(message, status)})
    return msgspec.json.encode({"error": {"message": message, "code": known_status(status)}})
