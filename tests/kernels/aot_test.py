# SPDX-License-Identifier: Apache-2.0
"""Compiled for real TPUs: one launch, in place, nothing hidden around it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from kvferry.kernels import aot, dispatch, layouts, report
from kvferry.kernels.aot import Case, Figures

_PAGE = (64, 8, 2, 128)
_PACKED = (48, 128)
# A last dimension of 64, as many models' heads are: XLA lays such pools out in another order.
_NARROW = (64, 8, 2, 64)
_KERNELS = ("scatter", "gather", "paged", "repage", "fresh_gather", "to_host", "to_device", "whole")


def _compile(requests: list[tuple[str, Case]]) -> list[Figures | str]:
    return list(aot.compile_cases(requests))


def test_every_kernel_is_one_launch_in_place() -> None:
    cases = [Case(kernel=kernel, page=_PAGE) for kernel in _KERNELS]
    cases += [Case(kernel=kernel, page=_PACKED, dtype="uint16") for kernel in _KERNELS[:-1]]
    cases += [
        Case(kernel=kernel, page=_PAGE, head_axis=1) for kernel in ("scatter", "gather", "to_host")
    ]
    requests = [(chip, case) for case in cases for chip in ("v5e", "tpu7x")]
    answers = _compile(requests)
    for (chip, case), figures in zip(requests, answers, strict=True):
        assert not isinstance(figures, str), (chip, case, figures)
        launches = report.launches(case)
        in_place = figures.in_place(donates=case.kernel != "fresh_gather", launches=launches)
        assert in_place, (chip, case, figures)


def test_what_the_kernel_refuses_and_xla_does_instead() -> None:
    """The page loop of XLA leaves every pool in place too, at the price of being a loop."""
    narrow = Case(kernel="scatter", page=_NARROW)
    refused, half, moved = _compile(
        [
            ("v5e", narrow),
            ("v5e", Case(kernel="scatter", page=_PACKED, dtype="float16")),
            ("v5e", dataclasses.replace(narrow, implementation="xla")),
        ]
    )
    assert isinstance(refused, str) and isinstance(half, str)
    assert refused.startswith("NotImplementedError: multi_layer_copy: src_array[0]: pages of")
    assert "hold the pool as [16, 512, 128]" in refused
    assert "hold the pool's bits as uint16" in half
    assert not isinstance(moved, str)
    assert moved.aliased_bytes == moved.dest_bytes
    if dispatch.libtpu_version() >= (0, 0, 49):
        assert moved.temporary_bytes < 1 << 20
    else:
        logging.warning("not checked: this libtpu does not keep XLA's page loop in place")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_layer_count_mesh_and_chip() -> None:
    lines = report.kernel_lines([1, 4, 32, 80])
    report.compile_lines(lines, list(aot.CHIPS))
    assert [(line.label, line.variant) for line in lines if not report.is_good(line)] == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_supported_layout_and_chip() -> None:
    lines = report.layout_lines()
    report.compile_lines(lines, list(aot.CHIPS))
    assert [(line.label, line.variant) for line in lines if not report.is_good(line)] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("chip", aot.CHIPS)
def test_the_rule_for_layouts_is_what_the_compiler_does(chip: str) -> None:
    """On both sides of the rule, the kernel alone compiled whether the rule allows it or not."""
    pages: list[tuple[int, ...]] = [(16, rows, 128) for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24)]
    pages += [(rows, 128) for rows in (1, 2, 4, 6, 8, 20, 24, 32, 40)]
    pages += [(64, 80), (64, 192), (4, 640), (16, 8, 64)]
    cases = [
        Case(kernel="unchecked", page=page, dtype=dtype, layers=2)
        for page in pages
        for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn")
    ]
    for case, figures in zip(cases, _compile([(chip, case) for case in cases]), strict=True):
        assert not isinstance(figures, str), (case, figures)
        dtype = np.dtype(jnp.dtype(case.dtype))
        allowed = layouts.moves_in_place((case.pool_pages, *case.page), dtype)
        # The small source may still be copied where the rule says no: a copy more, not fewer.
        assert figures.in_place(donates=True) is allowed, (case, figures)


def test_copies_are_counted() -> None:
    hlo = """
      %copy.8 = s32[16]{0:T(128)} copy(%sizes)
      %copy.9 = bf16[1024,16,8,128]{3,2,1,0:T(8,128)(2,1)} copy(%pool)
      %copy-start = (f32[99,9,128]{2,1,0}, f32[99,9,128]{2,1,0}, u32[]{:S(2)}) copy-start(%pages)
      %copy-done = f32[99,9,128]{2,1,0} copy-done(%copy-start)
      %transpose.1 = s8[1024,64,128]{2,0,1} transpose(%pool), dimensions={1,0,2}
      %copy_fusion = bf16[1024,16,8,128]{3,2,1,0} fusion(%copy.9), kind=kLoop
    """
    assert aot.count_array_copies(hlo) == 3


def test_in_place_means_all_of_it() -> None:
    good = Figures(
        custom_calls=1,
        temporary_bytes=0,
        dest_bytes=100,
        aliased_bytes=100,
        array_copies=0,
        seconds=1.0,
    )
    assert good.in_place(donates=True)
    for change in ({"custom_calls": 2}, {"temporary_bytes": 1}, {"array_copies": 1}):
        assert not dataclasses.replace(good, **change).in_place(donates=True)
    half = dataclasses.replace(good, aliased_bytes=50)
    assert not half.in_place(donates=True)
    assert half.in_place(donates=False)


def test_unknown_chip() -> None:
    with pytest.raises(ValueError, match="chip 'v99' is unknown; use one of v4, v5e"):
        aot.compile_case(Case(kernel="scatter", page=_PAGE), "v99")
    (answer,) = _compile([("v99", Case(kernel="scatter", page=_PAGE))])
    assert isinstance(answer, str) and answer.startswith("ValueError: chip 'v99'")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install libtpu"):
        _compile([("v5e", Case(kernel="scatter", page=_PAGE))])


def test_compiler_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="ended with code 1 after 0 of 1 cases"):
        _compile([("v5e", Case(kernel="scatter", page=_PAGE))])
