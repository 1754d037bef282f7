# SPDX-License-Identifier: Apache-2.0
"""Times Hugging Face transformers on the CPU, for engine_bench.py to stand beside.

Runs under any Python that has torch and transformers; imports nothing of kvferry. The first line
on standard input is a JSON object with `gguf`, `dtype` and `threads`; each following line asks for
one case, {"batch", "tokens", "context", "repeats"}, and is answered by a line with the median
seconds of a forward pass and its argmax: `wall`, and `cpu` of all threads.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answers until standard input ends."""
    job = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])

    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    folder, name = os.path.split(job["gguf"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=getattr(torch, job["dtype"])
    ).eval()
    with torch.inference_mode():
        for line in sys.stdin:
            case = json.loads(line)
            step = prepare(torch, transformers, model, case)
            print(json.dumps(medians(step, case["repeats"])), flush=True)


def prepare(torch: Any, transformers: Any, model: Any, case: dict[str, int]) -> Callable[[], Any]:
    """Returns a function that runs one forward pass.

    Args:
        torch: The module.
        transformers: The module.
        model: A causal language model.
        case: `batch` sequences get `tokens` new tokens each, after `context` old ones.

    Returns:
        The function. With a context, every call adds to it: it grows by a few tokens in all.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int) -> Any:
        shape = (case["batch"], tokens)
        return torch.randint(0, model.config.vocab_size, shape, generator=generator)

    ids = draw(case["tokens"])
    if not case["context"]:
        return lambda: model(ids, logits_to_keep=1).logits[:, -1].argmax(-1)
    cache = transformers.DynamicCache(config=model.config)
    model(draw(case["context"]), past_key_values=cache, logits_to_keep=1)
    return lambda: model(ids, past_key_values=cache).logits[:, -1].argmax(-1)


def medians(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Returns median wall and CPU seconds of a call, after one that does not count."""
    step()
    wall, cpu = [], []
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu)}


if __name__ == "__main__":
    main()
