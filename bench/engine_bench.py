# SPDX-License-Identifier: Apache-2.0
"""Times whole engine steps on the CPU against two yardsticks, and prints a table.

* "floor": what the step's weight matrix products alone cost, in one jit, in the same process,
  one repetition after each repetition of the step.
* transformers with torch in float32 and bfloat16, if `--torch_python` names an interpreter that
  has them: same file, same threads, a process of its own, each case right after ours.

A step is timed from the Python call to the token ids: inputs built, dispatched, computed, logits
read and argmax taken. Beside the wall time stands the CPU time of all threads, which means
something even when others use the machine.

    python -m kvferry.bench.engine_bench --torch_python=/path/to/python
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags

_MODEL_PATH = flags.DEFINE_string("model_path", None, "GGUF file; default: the demo's model.")
_THREADS = flags.DEFINE_integer("threads", 2, "CPUs that each process may use.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Repetitions; medians count.", lower_bound=5)
_TORCH_PYTHON = flags.DEFINE_string(
    "torch_python", None, "Python with torch and transformers to compare with."
)
_JSON = flags.DEFINE_string("json", None, "File to write the numbers to.")

_TORCH_DTYPES = ("float32", "bfloat16")

TorchStep = Callable[["Case"], "Seconds"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: `batch` sequences get `tokens` new tokens each, after `context` old ones."""

    batch: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        """What to call it in the table."""
        if not self.context:
            return f"prefill {self.tokens}"
        return f"decode, batch {self.batch}, context {self.context + 1}"


CASES = (
    Case(1, 512, 0),
    Case(1, 1, 127),
    Case(1, 1, 511),
    Case(8, 1, 127),
    Case(8, 1, 511),
)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Median seconds: wall clock, and CPU of all threads."""

    wall: float
    cpu: float


@dataclasses.dataclass(frozen=True)
class Row:
    """What one case costs.

    Attributes:
        case: The case.
        step: Our step.
        floor: Its matrix products alone.
        torch: transformers, by dtype.
    """

    case: Case
    step: Seconds
    floor: Seconds
    torch: dict[str, Seconds]


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark.

    Args:
        argv: Program name only.

    Raises:
        app.UsageError: There are other arguments.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    # Before JAX starts its threads, one per CPU that the process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _THREADS.value])
    from kvferry.demo.model import default_model_path

    path = pathlib.Path(_MODEL_PATH.value) if _MODEL_PATH.value else default_model_path()
    with contextlib.ExitStack() as stack:
        torch = {
            dtype: stack.enter_context(torch_process(_TORCH_PYTHON.value, path, dtype))
            for dtype in _TORCH_DTYPES
            if _TORCH_PYTHON.value
        }
        bench = EngineBench(path, _REPEATS.value)
        # The others are done loading when they answer; nothing runs beside what is measured.
        for run in torch.values():
            run(CASES[1])
        rows = [bench.measure(case, torch) for case in CASES]
    print(table(rows))
    if _JSON.value:
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
        pathlib.Path(_JSON.value).write_text(text, encoding="utf-8")


class EngineBench:
    """The engine with a model loaded."""

    def __init__(self, path: pathlib.Path, repeats: int) -> None:
        """Loads the model in float32.

        Args:
            path: The model.
            repeats: Repetitions of each measurement.
        """
        from kvferry.engine.loader import load_model
        from kvferry.engine.runner import ModelRunner
        from kvferry.engine.runner_options import RunnerOptions

        model = load_model(path, np.float32)
        self._repeats = repeats
        self._params = model.params
        self._vocab_size = model.config.vocab_size
        self._rng = np.random.default_rng(0)
        # Every case runs in shapes that fit it, as it would on a warm server.
        self._runner = ModelRunner(model, RunnerOptions(max_running_requests=8, num_pages=1024))

    def measure(self, case: Case, torch: dict[str, TorchStep]) -> Row:
        """Measures one case.

        Args:
            case: The case.
            torch: What to measure beside it, by name.

        Returns:
            All medians.
        """
        from kvferry.engine.step_inputs import Chunk

        total = case.context + case.tokens
        pages = -(-total // self._runner.pool.page_size)
        tables = [range(i * pages, (i + 1) * pages) for i in range(case.batch)]
        if case.context:
            # Keys and values that a model computed, not zeros.
            for table_ in tables:
                self._step([Chunk(self._draw(case.context), 0, table_)])
        chunks = [Chunk(self._draw(case.tokens), case.context, table_) for table_ in tables]
        logit_rows = case.batch if case.context else self._runner.sizes.prefill_sequences
        step, floor = medians(
            functools.partial(self._step, chunks),
            matrix_products(self._params, case.batch * case.tokens, logit_rows),
            self._repeats,
        )
        return Row(case, step, floor, {name: run(case) for name, run in torch.items()})

    def _draw(self, tokens: int) -> list[int]:
        return [int(i) for i in self._rng.integers(0, self._vocab_size, tokens)]

    def _step(self, chunks: list[Any]) -> Any:
        return np.asarray(self._runner.run(chunks).logits)[: len(chunks)].argmax(-1)


def matrix_products(params: Any, tokens: int, logit_rows: int) -> Callable[[], Any]:
    """Compiles the weight matrix products of a step and nothing else.

    Args:
        params: Parameter tree.
        tokens: Rows of the step.
        logit_rows: Rows that are projected onto the vocabulary.

    Returns:
        A function that runs them once and waits.
    """
    import jax
    from jax import lax

    placed = jax.device_put(params)
    head = placed.get("lm_head", placed["embed"])

    def run(layers: Any, head: jax.Array, x: jax.Array) -> jax.Array:
        for layer in layers:
            qkv = x @ layer["wqkv"]
            x = x + qkv[:, : layer["wo"].shape[0]] @ layer["wo"]
            gate, up = jax.numpy.split(x @ layer["w_gate_up"], 2, axis=1)
            x = x + (jax.nn.silu(gate) * up) @ layer["w_down"]
        return lax.dot_general(x[-logit_rows:], head, (((1,), (1,)), ((), ())))

    rng = np.random.default_rng(0)
    x = jax.numpy.asarray(rng.standard_normal((tokens, head.shape[1]), np.float32))
    compiled = jax.jit(run).lower(placed["layers"], head, x).compile()
    return lambda: compiled(placed["layers"], head, x).block_until_ready()


def medians(
    step: Callable[[], Any], floor: Callable[[], Any], repeats: int
) -> tuple[Seconds, Seconds]:
    """Times two functions in turn, so that both see the same moments of a busy machine.

    Args:
        step: One function.
        floor: The other.
        repeats: Repetitions of each, after one that does not count.

    Returns:
        Median seconds of each.
    """
    walls: tuple[list[float], list[float]] = ([], [])
    cpus: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for function, wall, cpu in zip((step, floor), walls, cpus, strict=True):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            function()
            wall.append(time.perf_counter() - wall_start)
            cpu.append(time.process_time() - cpu_start)
    first, second = (
        Seconds(statistics.median(wall[1:]), statistics.median(cpu[1:]))
        for wall, cpu in zip(walls, cpus, strict=True)
    )
    return first, second


@contextlib.contextmanager
def torch_process(python: str, path: pathlib.Path, dtype: str) -> Iterator[TorchStep]:
    """Runs torch_bench.py as long as the context lasts.

    Args:
        python: An interpreter that has torch and transformers.
        path: The model, a GGUF file.
        dtype: Of weights and cache.

    Yields:
        A function that measures one case.
    """
    process = subprocess.Popen(
        [python, str(pathlib.Path(__file__).with_name("torch_bench.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def measure(case: Case) -> Seconds:
        print(json.dumps(dataclasses.asdict(case) | {"repeats": _REPEATS.value}), file=requests)
        requests.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError(f"{python} ended with {process.wait()}; run torch_bench.py by hand")
        return Seconds(**json.loads(line))

    try:
        print(
            json.dumps({"gguf": str(path), "dtype": dtype, "threads": _THREADS.value}),
            file=requests,
            flush=True,
        )
        yield measure
    finally:
        process.kill()
        process.wait()


def table(rows: Sequence[Row]) -> str:
    """Formats rows as Markdown: milliseconds (of CPU, in brackets) and ratios of wall times.

    Args:
        rows: The rows.

    Returns:
        Lines of text.
    """
    dtypes = list(rows[0].torch)
    header = ["case", "step ms (CPU)", "floor ms (CPU)", "step / floor"]
    for dtype in dtypes:
        header += [f"torch {dtype} ms (CPU)", "torch / step"]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [row.case.name, _milliseconds(row.step), _milliseconds(row.floor)]
        cells.append(_ratio(row.step, row.floor))
        for dtype in dtypes:
            cells += [_milliseconds(row.torch[dtype]), _ratio(row.torch[dtype], row.step)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _milliseconds(seconds: Seconds) -> str:
    return f"{seconds.wall * 1e3:.1f} ({seconds.cpu * 1e3:.0f})"


def _ratio(above: Seconds, below: Seconds) -> str:
    return f"{above.wall / below.wall:.2f} ({above.cpu / below.cpu:.2f})"


if __name__ == "__main__":
    app.run(main)
