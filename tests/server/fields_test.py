# SPDX-License-Identifier: Apache-2.0
import pytest

from kvferry.server.errors import ApiError
from kvferry.server.fields import at_least, per_item, whole, whole_list


def test_whole_takes_ints_floats_without_fraction_and_none() -> None:
    assert whole("x", 3) == 3
    assert whole("x", 0.0) == 0
    assert isinstance(whole("x", 2.0), int)
    assert whole("x", None) is None
    assert whole("x", 2**63 - 1) == 2**63 - 1


def test_whole_refuses_fractions() -> None:
    with pytest.raises(ApiError, match=r"^x must be a whole number, is 2\.5$"):
        whole("x", 2.5)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 64), 1e300, 10**4000])
def test_whole_refuses_what_no_field_can_hold(value: float) -> None:
    with pytest.raises(ApiError, match="^x is out of range"):
        whole("x", value)


def test_at_least() -> None:
    assert at_least("x", 1.0, 1) == 1
    assert at_least("x", None, 1) is None
    with pytest.raises(ApiError, match="^x must be at least 1, is 0$"):
        at_least("x", 0, 1)


def test_whole_list_names_the_position() -> None:
    assert whole_list("x", [1, 2.0]) == (1, 2)
    with pytest.raises(ApiError, match=r"^x\[1\] must be a whole number"):
        whole_list("x", [1, 2.5])


def test_per_item() -> None:
    assert per_item("x", None, 2, 7) == [7, 7]
    assert per_item("x", 3, 2, 7) == [3, 3]
    assert per_item("x", [3, 4], 2, 7) == [3, 4]
    with pytest.raises(ApiError, match="^x has 1 items for 2 prompts"):
        per_item("x", [3], 2, 7)
