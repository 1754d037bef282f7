# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from kvferry.server.errors import ApiError, error_body, known_status


@pytest.mark.parametrize(
    ("given", "sent"),
    [(400, 400), (404, 404), (500, 500), (503, 503), (422, 400), (429, 400), (499, 400)]
    + [(501, 500), (502, 500), (504, 500), (200, 500)],
)
def test_only_four_statuses_leave_the_server(given: int, sent: int) -> None:
    assert known_status(given) == sent
    assert ApiError("x", given).status == sent


def test_sglang_body() -> None:
    body = json.loads(error_body("sglang", "no \u20ac", 503))
    assert body == {"error": {"message": "no \u20ac", "code": 503}}


def test_openai_body() -> None:
    body = json.loads(error_body("openai", "no", 400))
    assert body == {
        "error": {
            "object": "error",
            "message": "no",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
    }
