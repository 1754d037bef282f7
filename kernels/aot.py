# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for TPUs on a machine without one, and reads what the compiler made.

libtpu's compiler runs on any x86-64 Linux machine. What it says about a compiled program (how many
launches, how many temporary bytes, which outputs alias inputs, which copies it had to add) decides
whether a copy really happens in place. libtpu reads its settings once, so `compile_cases` compiles
in a process of its own, which is this module run as a program.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvferry.kernels import copy_to_host, multi_layer_copy
from kvferry.kernels.chunks import Chunks
from kvferry.kernels.multi_layer_copy import kernel

# The first two keep libtpu from asking a cloud's metadata server which machine this is.
_ENVIRONMENT = (
    "TPU_SKIP_MDS_QUERY=1",
    "TPU_WORKER_HOSTNAMES=localhost",
    "JAX_PLATFORMS=cpu",
    # There is no chip to fight for: several may compile at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD=1",
)

CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}

# A copy of less than this is one of the chunk list, not of an array.
_SCALAR_BYTES = 64 * 1024

# Pages of the source in one of the destination's, when re-paging.
_REPAGE_FACTOR = 4

_HLO_ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One program to compile.

    Attributes:
      kernel: "scatter", "gather", "paged", "repage" (multi_layer_copy in four ways),
        "fresh_gather" (gather_pages), "to_host" (gather_to_host), "to_device" or "whole"
        (copy_to_host); "unchecked" is a scatter by the kernel alone, whatever the layout.
      page: shape of one page.
      dtype: its name.
      layers: number of layers.
      head_axis: dimension of the page that a 2x2 mesh splits over all four chips; None: one chip.
      pool_pages: pages in each pool.
      chunk_pages: pages copied, and entries in the chunk list.
      implementation: "mosaic_tpu" or "xla".
    """

    kernel: str
    page: tuple[int, ...]
    dtype: str = "bfloat16"
    layers: int = 4
    head_axis: int | None = None
    pool_pages: int = 1024
    chunk_pages: int = 16
    implementation: str = "mosaic_tpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What the compiler made of a case, per device.

    Attributes:
      custom_calls: kernel launches.
      temporary_bytes: scratch memory in HBM.
      dest_bytes: bytes of the destinations.
      aliased_bytes: bytes of outputs that are an input's memory.
      array_copies: copies of more than a few scalars that the compiler added.
      seconds: to lower and compile.
    """

    custom_calls: int
    temporary_bytes: int
    dest_bytes: int
    aliased_bytes: int
    array_copies: int
    seconds: float

    def in_place(self, *, donates: bool, launches: int = 1) -> bool:
        """Says whether the copy is one launch (or so many) with nothing hidden around it."""
        return (
            self.custom_calls == launches
            and self.temporary_bytes == 0
            and self.array_copies == 0
            and (not donates or self.aliased_bytes == self.dest_bytes)
        )


def _shape_bytes(text: str) -> Iterator[int]:
    """Yields the size of every array shape in a piece of HLO text, such as bf16[16,128]{1,0}."""
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        sizes = [int(size) for size in dims.split(",") if size]
        yield math.prod(sizes) * _HLO_ITEM_BYTES.get(kind, 1)


def count_array_copies(hlo: str) -> int:
    """Counts the copies of arrays in a compiled program.

    Args:
      hlo: the program as `compiled.as_text()` gives it.

    Returns:
      The number of `copy`, `copy-start` and `transpose` instructions that write more than a few
      scalars.
    """
    count = 0
    for line in hlo.splitlines():
        found = re.search(r"= (.*?) (?:copy|copy-start|transpose)\(", line)
        if found and max(_shape_bytes(found[1]), default=0) > _SCALAR_BYTES:
            count += 1
    return count


@functools.lru_cache(maxsize=len(CHIPS))
def _devices(chip: str) -> Sequence[jax.Device]:
    return topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices


class _Builder:
    """Arguments and function of a case on one chip type."""

    def __init__(self, case: Case, chip: str) -> None:
        self._case = case
        if case.head_axis is None:
            self.mesh = Mesh(np.array(_devices(chip)[:1]), ("x",))
            self.spec = PartitionSpec()
        else:
            # tpu7x has two devices per chip; four devices are a 2x2 mesh everywhere.
            self.mesh = Mesh(np.array(_devices(chip)[:4]).reshape(2, 2), ("x", "y"))
            self.spec = PartitionSpec(*[None] * (1 + case.head_axis), ("x", "y"))
        self._device = NamedSharding(self.mesh, self.spec)
        self._host = NamedSharding(self.mesh, self.spec, memory_kind="pinned_host")
        self._replicated = NamedSharding(self.mesh, PartitionSpec())

    def _layers(
        self, pages: int, sharding: NamedSharding, page: tuple[int, ...] | None = None
    ) -> list[jax.ShapeDtypeStruct]:
        shape = (pages, *(page or self._case.page))
        spec = jax.ShapeDtypeStruct(shape, jnp.dtype(self._case.dtype), sharding=sharding)
        return [spec] * self._case.layers

    def lower(self) -> Any:
        """Lowers the case; `.compile()` of the result is left to the caller."""
        case, host, device = self._case, self._host, self._device
        pool, some = self._layers(case.pool_pages, device), self._layers(case.chunk_pages, device)
        slot = self._layers(case.chunk_pages, host)
        rows = _REPAGE_FACTOR * case.page[0]
        large = self._layers(case.pool_pages, device, (rows, *case.page[1:]))
        both: dict[str, Any] = {"mesh": self.mesh, "implementation": case.implementation}
        one: dict[str, Any] = {**both, "sharding_spec": self.spec}
        copy = functools.partial(
            multi_layer_copy.multi_layer_copy,
            src_sharding_spec=self.spec,
            dest_sharding_spec=self.spec,
            repage=case.kernel == "repage",
            **both,
        )

        def run_list(src: Any, dest: Any, ids: Any, count: Any) -> Any:
            return copy(
                src_array=src,
                dest_array=dest,
                src_offsets=ids,
                dest_offsets=ids,
                chunk_sizes=ids,
                num_chunks=count,
            )

        def run_gather(src: Any, dest: Any, ids: Any, count: Any) -> Any:
            return multi_layer_copy.gather_pages(src, ids, count, **one)

        def run_to_host(src: Any, dest: Any, ids: Any, count: Any) -> Any:
            return copy_to_host.gather_to_host(src, dest, ids, count, **one)

        def run_to_device(src: Any, dest: Any, ids: Any, count: Any) -> Any:
            return copy_to_host.copy_to_device(src, dest, ids, count, **one)

        def run_unchecked(src: Any, dest: Any, ids: Any, count: Any) -> Any:
            return kernel.copy_layers(src, dest, Chunks(ids, ids, ids, count))

        def run_whole(src: Any, dest: Any, ids: Any, count: Any) -> Any:
            return [copy_to_host.copy_to_host(src[0], dest[0], self.mesh, self.spec)]

        table: dict[str, tuple[Callable[..., Any], Any, Any, NamedSharding]] = {
            "scatter": (run_list, some, pool, device),
            "gather": (run_list, pool, some, device),
            "paged": (run_list, pool, pool, device),
            "unchecked": (run_unchecked, some, pool, device),
            "repage": (run_list, some, large, device),
            "fresh_gather": (run_gather, pool, None, device),
            "to_host": (run_to_host, pool, slot, host),
            "to_device": (run_to_device, slot, pool, device),
            "whole": (run_whole, pool[:1], self._layers(case.pool_pages, host)[:1], host),
        }
        function, src, dest, out = table[case.kernel]
        ids = jax.ShapeDtypeStruct((case.chunk_pages,), jnp.int32, sharding=self._replicated)
        count = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=self._replicated)
        donate = () if dest is None else (1,)
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=out)
        return jitted.lower(src, dest, ids, count)


def compile_case(case: Case, chip: str) -> Figures:
    """Compiles a case for a TPU.

    Args:
      case: what to compile.
      chip: a key of `CHIPS`.

    Returns:
      The figures of the compiled program.

    Raises:
      ValueError: the chip is unknown.
      NotImplementedError: the case's layout cannot move in place.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is unknown; use one of {', '.join(CHIPS)}.")
    start = time.monotonic()
    compiled = _Builder(case, chip).lower().compile()
    seconds = time.monotonic() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    shards = 1 if case.head_axis is None else 4
    pages = case.pool_pages * _POOL_IS_DEST.get(case.kernel, 0) or case.chunk_pages
    layers = 1 if case.kernel == "whole" else case.layers
    page_bytes = math.prod(case.page) * jnp.dtype(case.dtype).itemsize
    return Figures(
        custom_calls=hlo.count(" custom-call("),
        temporary_bytes=memory.temp_size_in_bytes + memory.host_temp_size_in_bytes,
        dest_bytes=layers * pages * page_bytes // shards,
        aliased_bytes=memory.alias_size_in_bytes + memory.host_alias_size_in_bytes,
        array_copies=count_array_copies(hlo),
        seconds=seconds,
    )


# Destinations that are pools, and pages of `Case.page` in each of their pages.
_POOL_IS_DEST = {
    "scatter": 1,
    "paged": 1,
    "unchecked": 1,
    "to_device": 1,
    "whole": 1,
    "repage": _REPAGE_FACTOR,
}


def compile_cases(requests: Sequence[tuple[str, Case]]) -> Iterator[Figures | str]:
    """Compiles cases in a process of its own.

    Args:
      requests: pairs of a key of `CHIPS` and what to compile for it.

    Yields:
      In the order of the requests, the figures of each, or why it could not be compiled.

    Raises:
      RuntimeError: libtpu is not installed, or the process ended early.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError("The TPU compiler is missing: pip install libtpu (Linux, x86-64).")
    lines = [json.dumps([chip, dataclasses.asdict(case)]) + "\n" for chip, case in requests]
    command = ["env", *_ENVIRONMENT, sys.executable, "-m", "kvferry.kernels.aot"]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as todo,
        tempfile.TemporaryFile("w+", encoding="utf-8") as noise,
    ):
        todo.writelines(lines)
        todo.seek(0)
        with subprocess.Popen(
            command, stdin=todo, stdout=subprocess.PIPE, stderr=noise, text=True
        ) as process:
            assert process.stdout is not None
            answered = 0
            for line in process.stdout:
                answered += 1
                answer = json.loads(line)
                yield answer["error"] if "error" in answer else Figures(**answer)
        if answered < len(lines):
            noise.seek(0)
            raise RuntimeError(
                f"The compiler ended with code {process.returncode} after {answered} of "
                f"{len(lines)} cases:\n{noise.read()[-2000:]}"
            )


def main(argv: Sequence[str]) -> None:
    """Reads cases as JSON lines [chip, case] on stdin and writes their figures as JSON lines.

    Args:
      argv: the program's name only.
    """
    del argv
    # A program from the cache says nothing about compile time.
    jax.config.update("jax_enable_compilation_cache", False)
    for line in sys.stdin:
        chip, fields = json.loads(line)
        case = Case(**{**fields, "page": tuple(fields["page"])})
        try:
            answer = dataclasses.asdict(compile_case(case, chip))
        except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv)
