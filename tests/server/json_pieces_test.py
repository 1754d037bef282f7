# SPDX-License-Identifier: Apache-2.0
import json

import hypothesis
import msgspec
from hypothesis import strategies

from kvferry.server.json_pieces import JsonList, JsonText

_TEXTS = strategies.lists(strategies.text(strategies.characters(exclude_categories=["Cs"])))


@hypothesis.given(_TEXTS)
def test_text_grows(parts: list[str]) -> None:
    text = JsonText()
    for i, part in enumerate(parts):
        text.append(part)
        assert json.loads(msgspec.json.encode({"t": text.raw()}))["t"] == "".join(parts[: i + 1])


def test_list_grows() -> None:
    items = JsonList()
    assert msgspec.json.encode(items.raw()) == b"[]"
    items.append(1)
    items.append([None, "a,]"])
    assert json.loads(msgspec.json.encode({"l": items.raw()})) == {"l": [1, [None, "a,]"]]}
