# SPDX-License-Identifier: Apache-2.0
"""Choice of the implementation, and what is said about it; platforms that are not here included."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels import dispatch, sharding
from kvferry.kernels.multi_layer_copy import gather_pages, scatter_pages


@pytest.mark.parametrize(
    ("implementation", "interpret", "platform", "problem", "expected"),
    [
        (None, False, "cpu", None, "xla"),
        (None, False, "gpu", None, "xla"),
        (None, False, "tpu", None, "mosaic_tpu"),
        (None, False, "tpu", "of its shape", "xla"),
        (None, True, "cpu", None, "mosaic_tpu"),
        (None, pltpu.InterpretParams(), "cpu", "of its shape", "mosaic_tpu"),
        ("xla", False, "tpu", None, "xla"),
        ("xla", False, "cpu", None, "xla"),
        ("mosaic_tpu", False, "tpu", None, "mosaic_tpu"),
        ("mosaic_tpu", True, "cpu", None, "mosaic_tpu"),
    ],
)
def test_choice(
    implementation: Any, interpret: Any, platform: str, problem: str | None, expected: str
) -> None:
    assert dispatch.choose("copy", implementation, interpret, platform, problem) == expected


def test_layout_that_the_kernel_cannot_move() -> None:
    with pytest.raises(NotImplementedError, match="copy: pages of odd shape."):
        dispatch.choose("copy", "mosaic_tpu", False, "tpu", "pages of odd shape")


def test_form_of_the_reference() -> None:
    assert dispatch.xla_form("tpu") == "page_loop"
    assert dispatch.xla_form("cpu") == "fastest"


@pytest.mark.parametrize(
    ("platform", "dtypes", "expected"),
    [
        ("cpu", ["float32", "float16", "uint16", "int8"], False),
        ("cpu", ["float32", "bfloat16"], True),
        ("cpu", ["float8_e5m2"], True),
        ("tpu", ["bfloat16"], False),
    ],
)
def test_bits(platform: str, dtypes: list[str], expected: bool) -> None:
    assert dispatch.move_bits(platform, [np.dtype(jnp.dtype(x)) for x in dtypes]) is expected


def test_slow_dtype_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="absl"):
        for _ in range(3):
            scatter_pages([jnp.ones((1, 4), jnp.bfloat16)], [jnp.ones((3, 4), jnp.bfloat16)], [2])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    gather_pages([jnp.ones((3, 4), jnp.bfloat16)], [2])  # reading costs nothing more
    assert len(caplog.records) == 1
    assert "pool of dtype bfloat16" in told[0] and "unsigned integers" in told[0]


class _Elsewhere:
    """A device array as its sharding describes it; no TPU is here to hold one."""

    def __init__(self, kind: str | None) -> None:
        self.sharding = type("Sharding", (), {"memory_kind": kind})()


@pytest.mark.parametrize(
    ("kind", "host", "message"),
    [
        ("device", True, r"slot\[0\] is in memory kind 'device', it has to be in 'pinned_host'"),
        (None, True, r"slot\[0\] is in memory kind 'device'"),
        ("pinned_host", False, r"slot\[0\] is in memory kind 'pinned_host', .* in 'device'"),
        ("device", False, None),
        ("pinned_host", True, None),
    ],
)
def test_memory_kind(
    kind: str | None, host: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "is_concrete", lambda array: True)
    array: Any = _Elsewhere(kind)
    side = sharding.Layers(name="slot", arrays=[array], spec_name="spec", spec=None)
    sharding.check_memory_kinds(side, "cpu", host=host)  # one memory: nothing to confuse
    if message is None:
        sharding.check_memory_kinds(side, "tpu", host=host)
        return
    with pytest.raises(ValueError, match=message):
        sharding.check_memory_kinds(side, "tpu", host=host)


def test_memory_kind_of_a_tracer_is_not_known() -> None:
    @jax.jit
    def check(array: jax.Array) -> jax.Array:
        side = sharding.Layers(name="slot", arrays=[array], spec_name="spec", spec=None)
        sharding.check_memory_kinds(side, "tpu", host=True)
        return array

    check(jnp.ones(3))
