# SPDX-License-Identifier: Apache-2.0
"""The kernels with one deliberate mistake each, and a program that tells how each is caught.

Every mutant is the text of a kernel module with one place changed. As a program this reads names
of mutants on stdin and answers each with a line: "caught: ..." or "survived". A mutant may wait
for ever for a signal that never comes, so the caller has to give it a time limit.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import types

from kvferry.kernels.copy_to_host import kernel as copy_to_host_kernel
from kvferry.kernels.multi_layer_copy import kernel as multi_layer_copy_kernel
from kvferry.tests.kernels.kernel_checks import COPY_TO_HOST, MULTI_LAYER_COPY, Check
from kvferry.tests.kernels.simulator import PARAMS, params_id


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A place in a kernel's source and what stands there instead.

    `hangs` says that it waits for a signal that never comes.
    """

    original: str
    instead: str
    hangs: bool = False


_COPY = {
    "wait removed": Mutant(
        "for_each_chunk(layer, layer % window, lambda copy: copy.wait())",
        "pass",
    ),
    "wait replaced by a second start": Mutant(
        "lambda copy: copy.wait()", "lambda copy: copy.start()"
    ),
    "last layer not waited for": Mutant(
        "for layer in range(num_layers):\n        for_each_chunk(layer, layer % window",
        "for layer in range(num_layers - 1):\n        for_each_chunk(layer, layer % window",
    ),
    "waits on another layer's semaphore": Mutant(
        "for_each_chunk(layer, layer % window, lambda copy: copy.wait())",
        "for_each_chunk(layer, (layer + 1) % window, lambda copy: copy.wait())",
        hangs=True,
    ),
    "starts on another layer's semaphore": Mutant(
        "for_each_chunk(layer + window, layer % window,",
        "for_each_chunk(layer + window, (layer + 1) % window,",
        hangs=True,
    ),
    "window one too large for its semaphores": Mutant(
        "range(min(window, num_layers)):\n        for_each_chunk(layer, layer % window,",
        "range(min(window + 1, num_layers)):\n        for_each_chunk(layer, layer,",
    ),
    "window one too small": Mutant(
        "range(min(window, num_layers))", "range(min(window - 1, num_layers))", hangs=True
    ),
    "layer after the window skipped": Mutant(
        "if layer + window < num_layers:\n            for_each_chunk(layer + window,",
        "if layer + window + 1 < num_layers:\n            for_each_chunk(layer + window + 1,",
        hangs=True,
    ),
    "source of another layer": Mutant("src_hbm_refs[layer]", "src_hbm_refs[layer ^ (layer < 2)]"),
    "destination of another layer": Mutant(
        "dest_hbm_refs[layer]", "dest_hbm_refs[layer ^ (layer < 2)]"
    ),
    "offsets swapped": Mutant(
        "src_offsets_smem_ref[chunk], dest_offsets_smem_ref[chunk], sizes",
        "dest_offsets_smem_ref[chunk], src_offsets_smem_ref[chunk], sizes",
    ),
    "destination one page on": Mutant(".at[pl.ds(dest, size)]", ".at[pl.ds(dest + 1, size)]"),
    "first chunk left out": Mutant("@pl.loop(0, count)", "@pl.loop(1, count)"),
    "last chunk left out": Mutant("@pl.loop(0, count)", "@pl.loop(0, count - 1)"),
    "num_chunks ignored": Mutant(
        "jnp.minimum(num_chunks_smem_ref[0], sizes_smem_ref.shape[0])",
        "sizes_smem_ref.shape[0]",
    ),
    "one chunk more": Mutant("num_chunks_smem_ref[0], sizes", "num_chunks_smem_ref[0] + 1, sizes"),
    "one page of each run": Mutant(", sizes_smem_ref[chunk]", ", 1"),
    "num_pages ignored": Mutant(
        "jnp.minimum(num_pages_smem_ref[0], page_ids_smem_ref.shape[0])",
        "page_ids_smem_ref.shape[0]",
    ),
    "gathered pages in another order": Mutant(
        "return page_ids_smem_ref[chunk], chunk, 1", "return page_ids_smem_ref[chunk], chunk ^ 1, 1"
    ),
    "outputs not the destinations' memory": Mutant(
        "{num_scalars + num_layers + i: i for i in range(num_layers)}", "{}"
    ),
}

_HOST = {
    "last waits removed": Mutant(
        "for step in range(max(0, len(steps) - window), len(steps)):", "for step in ():"
    ),
    "waits inside the window removed": Mutant(
        "when_used(step - window, step % window, lambda copy: copy.wait())", "pass"
    ),
    "one wait too few at the end": Mutant(
        "range(max(0, len(steps) - window), len(steps))",
        "range(max(0, len(steps) - window + 1), len(steps))",
    ),
    "waits on another page's semaphore": Mutant(
        "when_used(step - window, step % window,",
        "when_used(step - window, (step + 1) % window,",
        hangs=True,
    ),
    "window off by one": Mutant("if step >= window:", "if step > window:"),
    "page of another row": Mutant(
        "page = page_ids_smem_ref[row]", "page = page_ids_smem_ref[row - 1]"
    ),
    "row instead of page": Mutant("page = page_ids_smem_ref[row]", "page = row"),
    "directions swapped": Mutant(
        "(page, row) if to_host else (row, page)", "(row, page) if to_host else (page, row)"
    ),
    "one page more": Mutant("row < num_pages_smem_ref[0]", "row <= num_pages_smem_ref[0]"),
    "num_pages ignored": Mutant("@pl.when(row < num_pages_smem_ref[0])", "@pl.when(row >= 0)"),
    "first row left out": Mutant(
        "@pl.when(row < num_pages_smem_ref[0])",
        "@pl.when((row > 0) & (row < num_pages_smem_ref[0]))",
    ),
    "source of another layer": Mutant("src_refs[layer].at", "src_refs[layer ^ (layer < 2)].at"),
    "destination of another layer": Mutant(
        "dest_refs[layer].at", "dest_refs[layer ^ (layer < 2)].at"
    ),
    "whole array not waited for": Mutant("    copy.wait()\n", "    pass\n"),
}

_KERNELS: dict[str, tuple[types.ModuleType, dict[str, Mutant], dict[str, Check]]] = {
    "multi_layer_copy": (multi_layer_copy_kernel, _COPY, MULTI_LAYER_COPY),
    "copy_to_host": (copy_to_host_kernel, _HOST, COPY_TO_HOST),
}

MUTANTS = {
    f"{kernel}: {name}": mutant
    for kernel, (_, mutants, _) in _KERNELS.items()
    for name, mutant in mutants.items()
}


def changed(source: str, mutant: Mutant) -> str:
    """Returns the source with the mutant's mistake.

    Raises:
      ValueError: the source does not have the place that the mutant changes, or has it twice.
    """
    if source.count(mutant.original) != 1:
        raise ValueError(f"{mutant.original!r} is {source.count(mutant.original)} times there")
    return source.replace(mutant.original, mutant.instead)


def build(name: str) -> types.ModuleType:
    """Returns a mutant, a key of MUTANTS, as a module."""
    source = pathlib.Path(str(_kernel_of(name)[0].__file__)).read_text(encoding="utf-8")
    module = types.ModuleType("mutant")
    exec(compile(changed(source, MUTANTS[name]), "mutant", "exec"), vars(module))
    return module


def _kernel_of(name: str) -> tuple[types.ModuleType, dict[str, Check]]:
    module, _, checks = _KERNELS[name.partition(": ")[0]]
    return module, checks


def first_failure(name: str) -> str | None:
    """Runs the checks on a mutant until one fails; returns which, or None."""
    module, checks = build(name), _kernel_of(name)[1]
    # Races first: a mutant that hangs when DMAs run at their wait may only race when they do not.
    for params in sorted(PARAMS, key=lambda params: not params.detect_races):
        for check_name, check in checks.items():
            try:
                check(module, params)
            except Exception as error:  # whatever a mutant does wrong is a catch
                return f"{check_name}, {params_id(params)}: {type(error).__name__}"
    return None


def main() -> None:
    for line in sys.stdin:
        failure = first_failure(line.rstrip("\n"))
        print("survived" if failure is None else f"caught: {failure}", flush=True)


if __name__ == "__main__":
    main()
