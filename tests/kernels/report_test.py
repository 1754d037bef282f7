# SPDX-License-Identifier: Apache-2.0
"""The compile report's tables and the list of supported layouts."""

from __future__ import annotations

import pathlib

from kvferry.kernels import aot, report
from kvferry.kernels.aot import Figures
from kvferry.kernels.multi_layer_copy import arg_specs

_GOOD = Figures(
    custom_calls=1,
    temporary_bytes=0,
    dest_bytes=100,
    aliased_bytes=100,
    array_copies=0,
    seconds=1.0,
)


def _all_good(lines: list[report.Line]) -> None:
    for line in lines:
        line.figures.update(dict.fromkeys(aot.CHIPS, _GOOD))


def test_equal_figures_share_a_row() -> None:
    lines = [line for line in report.kernel_lines([1, 32]) if line.case.kernel == "scatter"]
    _all_good(lines)
    lines[0].figures["v4"] = "XlaRuntimeError: no such chip\nand more"
    text = report.table("kernel | mesh", "layers", lines)
    assert text.splitlines() == [
        "| kernel | mesh | layers | TPUs | launches | temporary bytes | aliased | array copies |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| multi_layer_copy, contiguous to paged | 1 chip | 1 | v4 | "
        "failed: XlaRuntimeError: no such chip | | |  |",
        "| multi_layer_copy, contiguous to paged | 1 chip | 1 | v5e v5p v6e tpu7x | "
        "1 | 0 | 100 % | 0 |",
        "| multi_layer_copy, contiguous to paged | 1 chip | 32 | v4 v5e v5p v6e tpu7x | "
        "1 | 0 | 100 % | 0 |",
        "| multi_layer_copy, contiguous to paged | 2x2, heads split | 1, 32 | "
        "v4 v5e v5p v6e tpu7x | 1 | 0 | 100 % | 0 |",
    ]
    assert [report.is_good(line) for line in lines] == [False, True, True, True]


def test_docs_keep_the_tables() -> None:
    # The figures are asserted where they are compiled: the slow tests of aot_test.py.
    docs = pathlib.Path(report.__file__).parents[1] / "docs" / "kernels.md"
    text = docs.read_text(encoding="utf-8")
    for labels, variants, lines in (
        ("kernel | mesh", "layers", report.kernel_lines([1, 4, 32, 80])),
        (report.LAYOUT_LABELS, "dtype", report.layout_lines()),
    ):
        _all_good(lines)
        assert report.table(labels, variants, lines) in text


def test_every_dtype_head_size_and_head_count_is_in_the_list() -> None:
    held = {
        (layout.dtype, name)
        for layout in arg_specs.page_layouts()
        for name in layout.holds.split(", ")
    }
    for dtype in ("bfloat16", "float32", "uint16", "int8", "float8_e4m3fn", "float8_e5m2"):
        for head_dim in (64, 80, 96, 128, 192, 256):
            for heads in (1, 3, 8, 32):
                assert (dtype, f"{heads}x{head_dim}") in held
        assert (dtype, "latent 576") in held
