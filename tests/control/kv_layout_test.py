# SPDX-License-Identifier: Apache-2.0
from typing import Any

import msgspec
import pytest

from kvferry.control.kv_layout import KVLayout, LayoutMismatchError, compare
from kvferry.tests.control.pairs import LAYOUT

OTHER: dict[str, Any] = {
    "num_layers": 30,
    "page_size": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "dtype": "float32",
    "storage_dtype": "float32",
    "page_shape": (4, 3, 16),
    "page_buckets": (1, 2),
    "model_fingerprint": "another",
    "max_context": 128,
    "tp_size": 2,
    "dp_size": 2,
    "state_parts": ("draft",),
    "layout_version": 2,
}


def changed(**values: Any) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, **values)


def test_equal_layouts_fit() -> None:
    compare(LAYOUT, changed())


def test_every_field_is_compared() -> None:
    assert set(OTHER) == set(KVLayout.__struct_fields__)


@pytest.mark.parametrize("field", sorted(OTHER))
def test_a_difference_names_field_and_both_values(field: str) -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        compare(LAYOUT, changed(**{field: OTHER[field]}))
    text = str(caught.value)
    assert field in text and repr(getattr(LAYOUT, field)) in text and repr(OTHER[field]) in text
    assert caught.value.field == field
    assert caught.value.prefill_value == getattr(LAYOUT, field)
    assert caught.value.decode_value == OTHER[field]


def test_the_version_is_compared_first() -> None:
    with pytest.raises(LayoutMismatchError, match="layout_version"):
        compare(LAYOUT, changed(layout_version=9, dtype="int8", page_size=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("page_size", -1),
        ("max_context", 0),
        ("tp_size", 0),
        ("page_shape", (4, 0)),
        ("page_buckets", ()),
        ("page_buckets", (2, 1)),
        ("page_buckets", (1, 1)),
    ],
)
def test_bad_values_are_refused(field: str, value: Any) -> None:
    fields = {name: getattr(LAYOUT, name) for name in KVLayout.__struct_fields__}
    with pytest.raises(ValueError, match=field):
        KVLayout(**{**fields, field: value})


def test_layouts_travel() -> None:
    data = msgspec.msgpack.encode(LAYOUT)
    assert msgspec.msgpack.decode(data, type=KVLayout) == LAYOUT
