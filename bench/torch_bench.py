# SPDX-License-Identifier: Apache-2.0
"""Times Hugging Face transformers on the CPU, for engine_bench.py to stand beside.

Runs under any Python that has torch and transformers; imports nothing of kvferry. Reads a JSON
object on standard input (gguf, dtype, threads, repeats, prefill, decode) and prints one with
seconds per case.
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
    """Runs the cases that standard input asks for."""
    job = json.load(sys.stdin)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])

    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    folder, name = os.path.split(job["gguf"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=getattr(torch, job["dtype"])
    ).eval()
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size

    def draw(batch: int, tokens: int) -> Any:
        return torch.randint(0, vocabulary, (batch, tokens), generator=generator)

    seconds = {}
    with torch.inference_mode():
        for tokens in job["prefill"]:
            ids = draw(1, tokens)

            def prefill(ids: Any = ids) -> Any:
                return model(ids, logits_to_keep=1).logits[:, -1].argmax(-1)

            seconds[f"prefill {tokens}"] = median(prefill, job["repeats"])
        for batch, context in job["decode"]:
            cache = transformers.DynamicCache(config=model.config)
            model(draw(batch, context - 1), past_key_values=cache, logits_to_keep=1)
            ids = draw(batch, 1)

            # Every repetition appends one token: the context grows by a few in all.
            def step(ids: Any = ids, cache: Any = cache) -> Any:
                return model(ids, past_key_values=cache).logits[:, -1].argmax(-1)

            seconds[f"decode {batch} at {context}"] = median(step, job["repeats"])
    print(json.dumps({"torch": torch.__version__, "seconds": seconds}))


def median(step: Callable[[], Any], repeats: int) -> float:
    """Returns the median seconds of a call, after one that does not count."""
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
