# SPDX-License-Identifier: Apache-2.0
"""Prints what libtpu's compiler makes of the kernels, for every TPU and every supported layout.

    python -m kvferry.kernels.report

Needs no TPU. docs/kernels.md keeps the tables.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from absl import flags

from kvferry.kernels import aot, programs
from kvferry.kernels.aot import Case, Figures
from kvferry.kernels.copy_to_host.kernel import copies_to_host_by_layer
from kvferry.kernels.multi_layer_copy import arg_specs

_FLAGS = programs.own_flags()
_CHIPS = flags.DEFINE_list("chips", list(aot.CHIPS), "TPUs to compile for.", flag_values=_FLAGS)
_LAYERS = flags.DEFINE_list(
    "layers", ["1", "4", "32", "80"], "Layer counts to compile.", flag_values=_FLAGS
)
_LAYOUTS = flags.DEFINE_bool(
    "layouts", True, "Also compile every supported page layout.", flag_values=_FLAGS
)

# K and V of 8 heads of 128, 64 tokens: a page that needs no packing and that a 2x2 mesh can split.
_PAGE = (64, 8, 2, 128)
_HEAD_AXIS = 1
# Pools of 80 layers, re-paged ones four times as large, have to fit the smallest HBM (16 GB).
_POOL_PAGES = 128

LAYOUT_LABELS = "page | holds (KV heads x head size, 16 tokens)"
KERNELS = {
    "scatter": "multi_layer_copy, contiguous to paged",
    "gather": "multi_layer_copy, paged to contiguous",
    "paged": "multi_layer_copy, paged to paged",
    "repage": "multi_layer_copy, pages of 64 into pages of 256",
    "fresh_gather": "gather_pages, into new arrays",
    "to_host": "gather_to_host",
    "to_device": "copy_to_device",
    "whole": "copy_to_host",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One row of a table: a case and its figures on every chip.

    Attributes:
      case: what was compiled.
      label: the first cells of the row.
      variant: the cell in which rows with the same label differ.
      figures: by chip; text says why it could not be compiled.
    """

    case: Case
    label: str
    variant: str
    figures: dict[str, Figures | str] = dataclasses.field(default_factory=dict)


def kernel_lines(layers: Sequence[int]) -> list[Line]:
    """Lists every kernel with every layer count, on one chip and on a 2x2 mesh.

    Args:
      layers: layer counts.

    Returns:
      What to compile; the layer count is the variant.
    """
    lines = []
    for kernel, name in KERNELS.items():
        for mesh, head_axis in (("1 chip", None), ("2x2, heads split", _HEAD_AXIS)):
            for count in [1] if kernel == "whole" else layers:
                case = Case(
                    kernel=kernel,
                    page=_PAGE,
                    layers=count,
                    head_axis=head_axis,
                    pool_pages=_POOL_PAGES,
                )
                lines.append(Line(case=case, label=f"{name} | {mesh}", variant=str(count)))
    return lines


def layout_lines() -> list[Line]:
    """Lists every supported page layout, written by the kernel that is strictest about it.

    Returns:
      What to compile; the dtype is the variant.
    """
    return [
        Line(
            case=Case(kernel="scatter", page=layout.page, dtype=layout.dtype, layers=2),
            label=f"{list(layout.page)} | {layout.holds}",
            variant=layout.dtype,
        )
        for layout in arg_specs.page_layouts()
    ]


def compile_lines(lines: Sequence[Line], chips: Sequence[str]) -> None:
    """Compiles every line's case for every chip, and fills in the figures.

    Args:
      lines: what to compile.
      chips: keys of `aot.CHIPS`.

    Raises:
      RuntimeError: there is no compiler, or it ended early.
    """
    requests = [(chip, line.case) for line in lines for chip in chips]
    answers = aot.compile_cases(requests)
    for index, (answer, (chip, _)) in enumerate(zip(answers, requests, strict=True)):
        lines[index // len(chips)].figures[chip] = answer
        if sys.stderr.isatty():
            print(f"\r{index + 1}/{len(requests)}", end="", file=sys.stderr)


def launches(case: Case) -> int:
    """Returns how many launches a case takes: one, but to the host with an old compiler."""
    return case.layers if case.kernel == "to_host" and copies_to_host_by_layer() else 1


def is_good(line: Line) -> bool:
    """Says whether a case has its launches, in place, with nothing hidden, on every chip."""
    donates = line.case.kernel != "fresh_gather"
    return all(
        not isinstance(figures, str)
        and figures.in_place(donates=donates, launches=launches(line.case))
        for figures in line.figures.values()
    )


def _cells(figures: Figures | str, *, donates: bool) -> str:
    if isinstance(figures, str):
        return f"failed: {figures.splitlines()[0][:80]} | | | "
    aliased = f"{100 * figures.aliased_bytes / figures.dest_bytes:.0f} %" if donates else "-"
    return (
        f"{figures.custom_calls} | {figures.temporary_bytes} | {aliased} | {figures.array_copies}"
    )


def table(labels: str, variants: str, lines: Sequence[Line]) -> str:
    """Formats lines; variants and chips with the same figures share a row.

    Args:
      labels: heads of the columns of the labels.
      variants: head of the column of the variants.
      lines: what was compiled.

    Returns:
      A Markdown table.
    """
    columns = f"{labels} | {variants} | TPUs | launches | temporary bytes | aliased | array copies"
    merged: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        chips: dict[str, list[str]] = {}
        for chip, figures in line.figures.items():
            cells = _cells(figures, donates=line.case.kernel != "fresh_gather")
            chips.setdefault(cells, []).append(chip)
        for cells, names in chips.items():
            merged.setdefault((line.label, " ".join(names), cells), []).append(line.variant)
    rows = [f"| {columns} |", "|" + " --- |" * (columns.count("|") + 1)]
    for (label, names_text, cells), values in merged.items():
        rows.append(f"| {label} | {', '.join(values)} | {names_text} | {cells} |")
    return "\n".join(rows)


def main(argv: Sequence[str]) -> int:
    """Prints the tables.

    Args:
      argv: the program's name only.

    Returns:
      0 if every case is as promised, else 1.
    """
    del argv
    lines = kernel_lines([int(count) for count in _LAYERS.value])
    compile_lines(lines, _CHIPS.value)
    print(table("kernel | mesh", "layers", lines))
    if _LAYOUTS.value:
        layouts = layout_lines()
        compile_lines(layouts, _CHIPS.value)
        print()
        print(table(LAYOUT_LABELS, "dtype", layouts))
        lines += layouts
    bad = [f"{line.label} | {line.variant}" for line in lines if not is_good(line)]
    print(f"\n{len(lines)} cases on {', '.join(_CHIPS.value)}: {len(bad)} not as promised.")
    for label in bad:
        print(f"  {label}")
    return 1 if bad else 0


if __name__ == "__main__":
    programs.run(main, _FLAGS)
