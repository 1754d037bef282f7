# SPDX-License-Identifier: Apache-2.0
"""Times one request through router, prefill and decode server against one colocated server.

Both serve the same model on this machine and are asked in turn, so the difference is what the
split costs when nothing is gained by it: one request at a time on one machine. The time to the
first token is the client's; its split comes from the servers' own marks.

    python -m kvferry.bench.pair_bench
"""

import dataclasses
import http.client
import json
import random
import statistics
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags

from kvferry.demo.model import default_model_path
from kvferry.demo.processes import Processes
from kvferry.demo.progress import Progress
from kvferry.demo.stack import Stack, get_json

_MODEL_PATH = flags.DEFINE_string("model_path", None, "Model; default: the demo's.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Repetitions; medians count.", lower_bound=5)
_OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 24, "Tokens per answer.", lower_bound=2)

PROMPT_TOKENS = (128, 512)
_WARM_UPS = 2
_FIRST_ID, _LAST_ID = 100, 30_000  # ordinary tokens of the demo's vocabulary
_SERVER_FLAGS = ("--max_context=2048", "--num_pages=768")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One streamed answer, seen by the client: seconds to the first token, and per further one."""

    first: float
    per_token: float


def ask(url: str, prompt_ids: Sequence[int], max_tokens: int) -> Sample:
    """Streams one greedy answer.

    Args:
      url: server or router.
      prompt_ids: the prompt.
      max_tokens: length of the answer, at least 2.

    Returns:
      What the client saw.

    Raises:
      ConnectionError: the answer is not a complete stream.
    """
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt_ids), "sampling_params": sampling, "stream": True}
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=300)
    try:
        started = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        answer = connection.getresponse()
        arrivals = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    finally:
        connection.close()
    if answer.status != http.client.OK or len(arrivals) != max_tokens:
        raise ConnectionError(f"{url} answered {answer.status} with {len(arrivals)} events")
    per_token = (arrivals[-1] - arrivals[0]) / (max_tokens - 1)
    return Sample(arrivals[0] - started, per_token)


def split(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> dict[str, float]:
    """Splits the last request's time to first token, in seconds, by the servers' marks.

    Args:
      prefill: state of the prefill server.
      decode: state of the decode server.

    Returns:
      Stage to seconds; what is between the stages (HTTP, threads, router) is not in it.
    """
    p, d = prefill["last_handover_stages"], decode["last_handover_stages"]
    pull = decode["last_pull_seconds"]
    return {
        "queue (reserving pages on D)": d["reserved"],
        "meeting (until P may work)": p["credit"],
        "prefill": p["prefill_done"] - p["credit"],
        "gather and publish": p["published"] - p["prefill_done"],
        "wire": pull,
        "scatter and first token out": d["committed"] - d["transfer_start"] - pull,
    }


def measure(stack: Stack, length: int) -> None:
    """Measures prompts of one length and prints the table.

    Args:
      stack: a pair, a router and a colocated server, started.
      length: tokens of a prompt.
    """
    choose = random.Random(length)
    paths: dict[str, Callable[[], str]] = {
        "pair": lambda: stack.router_url,
        "colocated": lambda: stack.colocated[0].url,
    }
    samples: dict[str, list[Sample]] = {name: [] for name in paths}
    splits: list[dict[str, float]] = []
    for turn in range(_WARM_UPS + _REPEATS.value):
        prompt = [choose.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]
        for name, url in paths.items():
            sample = ask(url(), prompt, _OUTPUT_TOKENS.value)
            if turn >= _WARM_UPS:
                samples[name].append(sample)
        if turn >= _WARM_UPS:
            servers = (stack.prefills[0], stack.decodes[0])
            states = [
                get_json(f"{server.url}/server_info")["internal_states"][0] for server in servers
            ]
            splits.append(split(*states))
    _print_table(length, samples, splits)


def _print_table(
    length: int, samples: Mapping[str, Sequence[Sample]], splits: Sequence[Mapping[str, float]]
) -> None:
    def median(values: Sequence[float]) -> float:
        return 1000 * statistics.median(values)

    print(f"\nprompt of {length} tokens, medians of {len(splits)}, milliseconds")
    first = {name: median([s.first for s in found]) for name, found in samples.items()}
    for name, found in samples.items():
        per_token = median([s.per_token for s in found])
        print(f"  {name:<40} first token {first[name]:8.1f}   then per token {per_token:6.1f}")
    extra = first["pair"] - first["colocated"]
    print(f"  {'extra to the first token':<40} {extra:20.1f}")
    for stage in splits[0]:
        print(f"    {stage:<38} {median([each[stage] for each in splits]):20.1f}")


def main(argv: Sequence[str]) -> None:
    """Starts the servers, measures, and ends them.

    Args:
      argv: the command line without its flags.
    """
    del argv
    model = _MODEL_PATH.value or default_model_path()
    flags_by_role = {role: _SERVER_FLAGS for role in ("prefill", "decode", "null")}
    with Processes(progress=Progress(sys.stderr)) as processes:
        stack = Stack(model, flags=flags_by_role, processes=processes).start()
        stack.start_server("null")
        for length in PROMPT_TOKENS:
            measure(stack, length)


if __name__ == "__main__":
    app.run(main)
