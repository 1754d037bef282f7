# SPDX-License-Identifier: Apache-2.0
"""Times whole engine steps on the CPU against two yardsticks, and prints a table.

* "floor": what the step's weight matrix products alone cost, in one jit, in the same process,
  one repetition after each repetition of the step.
* transformers with torch in float32 and bfloat16, if `--torch_python` names an interpreter that
  has them: same file, same threads, a process of its own, right afterwards.

A step is timed from the Python call to the token ids: inputs built, dispatched, computed, logits
read and argmax taken.

    python -m kvferry.bench.engine_bench --torch_python=/path/to/python
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
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

PREFILL_TOKENS = (512,)
DECODE_CASES = ((1, 128), (1, 512), (8, 128), (8, 512))
_TORCH_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass
class Row:
    """Seconds of one case.

    Attributes:
        name: The case.
        step: Our step.
        floor: Its matrix products alone.
        torch: transformers, by dtype.
    """

    name: str
    step: float
    floor: float
    torch: dict[str, float] = dataclasses.field(default_factory=dict)


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
    rows = measure(path, _REPEATS.value)
    if _TORCH_PYTHON.value:
        for dtype in _TORCH_DTYPES:
            seconds = measure_torch(_TORCH_PYTHON.value, path, dtype)
            for row in rows:
                row.torch[dtype] = seconds[row.name]
    print(table(rows))
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(
            json.dumps([dataclasses.asdict(row) for row in rows], indent=1), encoding="utf-8"
        )


def measure(path: pathlib.Path, repeats: int) -> list[Row]:
    """Times our steps and their floors.

    Args:
        path: The model.
        repeats: Repetitions of each.

    Returns:
        One row per case.
    """
    import jax

    from kvferry.engine.loader import load_model
    from kvferry.engine.runner import ModelRunner
    from kvferry.engine.runner_options import RunnerOptions
    from kvferry.engine.step_inputs import Chunk

    model = load_model(path, np.float32)
    runner = ModelRunner(model, RunnerOptions(max_running_requests=8, num_pages=1024))
    params = jax.device_put(model.params)
    rng = np.random.default_rng(0)

    def draw(tokens: int) -> list[int]:
        return [int(i) for i in rng.integers(0, model.config.vocab_size, tokens)]

    def pages(i: int, tokens: int) -> range:
        count = -(-tokens // runner.pool.page_size)
        return range(i * count, (i + 1) * count)

    def step(chunks: list[Chunk]) -> Any:
        return np.asarray(runner.run(chunks).logits)[: len(chunks)].argmax(-1)

    cases = {f"prefill {n}": [Chunk(draw(n), 0, pages(0, n))] for n in PREFILL_TOKENS}
    rows = []
    for name, chunks in cases.items():
        tokens = len(chunks[0].token_ids)
        products = matrix_products(params, tokens, runner.sizes.prefill_sequences)
        rows.append(Row(name, *medians(functools.partial(step, chunks), products, repeats)))
    for batch, context in DECODE_CASES:
        # A real context: keys and values that a model computed, not zeros.
        for i in range(batch):
            step([Chunk(draw(context - 1), 0, pages(i, context))])
        chunks = [Chunk(draw(1), context - 1, pages(i, context)) for i in range(batch)]
        products = matrix_products(params, batch, batch)
        rows.append(
            Row(
                f"decode {batch} at {context}",
                *medians(functools.partial(step, chunks), products, repeats),
            )
        )
    return rows


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

    hidden = params["embed"].shape[1]
    head = params.get("lm_head", params["embed"])

    def run(layers: Any, head: jax.Array, x: jax.Array) -> jax.Array:
        for layer in layers:
            qkv = x @ layer["wqkv"]
            x = x + qkv[:, : layer["wo"].shape[0]] @ layer["wo"]
            gate, up = jax.numpy.split(x @ layer["w_gate_up"], 2, axis=1)
            x = x + (jax.nn.silu(gate) * up) @ layer["w_down"]
        return lax.dot_general(x[-logit_rows:], head, (((1,), (1,)), ((), ())))

    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((tokens, hidden), np.float32))
    compiled = jax.jit(run).lower(params["layers"], head, x).compile()
    return lambda: compiled(params["layers"], head, x).block_until_ready()


def medians(step: Callable[[], Any], floor: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Times two functions in turn, so that both see the same moments of a busy machine.

    Args:
        step: One function.
        floor: The other.
        repeats: Repetitions of each, after one that does not count.

    Returns:
        Median seconds of each.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for function, found in zip((step, floor), times, strict=True):
            start = time.perf_counter()
            function()
            found.append(time.perf_counter() - start)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def measure_torch(python: str, path: pathlib.Path, dtype: str) -> dict[str, float]:
    """Times transformers in a process of its own.

    Args:
        python: An interpreter that has torch and transformers.
        path: The model, a GGUF file.
        dtype: Of weights and cache.

    Returns:
        Seconds by case name.

    Raises:
        RuntimeError: The process failed; with the end of what it said.
    """
    job = {
        "gguf": str(path),
        "dtype": dtype,
        "threads": _THREADS.value,
        "repeats": _REPEATS.value,
        "prefill": PREFILL_TOKENS,
        "decode": DECODE_CASES,
    }
    result = subprocess.run(
        [python, str(pathlib.Path(__file__).with_name("torch_bench.py"))],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"{python} failed for {dtype}: {result.stderr[-1000:]}")
    seconds: dict[str, float] = json.loads(result.stdout.splitlines()[-1])["seconds"]
    return seconds


def table(rows: Sequence[Row]) -> str:
    """Formats rows as a Markdown table, in milliseconds and ratios.

    Args:
        rows: The rows.

    Returns:
        Lines of text.
    """
    dtypes = list(rows[0].torch)
    header = ["case", "step ms", "floor ms", "step / floor"]
    for dtype in dtypes:
        header += [f"torch {dtype} ms", "torch / step"]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [row.name, f"{row.step * 1e3:.1f}", f"{row.floor * 1e3:.1f}"]
        cells.append(f"{row.step / row.floor:.2f}")
        for dtype in dtypes:
            cells += [f"{row.torch[dtype] * 1e3:.1f}", f"{row.torch[dtype] / row.step:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
