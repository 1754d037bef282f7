# SPDX-License-Identifier: Apache-2.0
"""Whole steps, compiled for TPUs: the pool is updated in place, and nothing copies it."""

import json
import subprocess
import sys
from typing import Any

import pytest

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
# Far below one layer of the pool (128 and 64 MiB): with all of the pool aliased, a copy of a layer
# would have to be a temporary. Most of it is the embedding table of SmolLM2 (576 wide: not a
# multiple of 128 lanes), laid out once for the lookup and once for the logits.
MAX_TEMP_BYTES = {"smollm2": 96 << 20, "llama_8b": 24 << 20}


def compile_steps(topology: str, model: str, layers: int, timeout_seconds: float) -> list[Any]:
    """Compiles in a process of its own and returns what it reports."""
    command = [sys.executable, "-m", "kvferry.tests.engine.aot_compile"]
    result = subprocess.run(
        [*command, topology, model, str(layers)],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def check(reports: list[Any], model: str) -> None:
    kinds = {report["label"].split()[2] for report in reports}
    assert kinds >= {"prefill", "decode"}
    for report in reports:
        label = report["label"]
        assert report["pool_copies"] == [], label
        if not label.endswith("gather"):
            assert report["alias_bytes"] >= report["pool_bytes"], label
        assert report["temp_bytes"] <= MAX_TEMP_BYTES[model], label
        assert report["kernels"] > 0 or report["unprintable"], label


@pytest.mark.parametrize("model", ["smollm2", "llama_8b"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_steps_compile_with_the_pool_in_place(topology: str, model: str) -> None:
    check(compile_steps(topology, model, 2, timeout_seconds=280), model)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["smollm2", "llama_8b"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_layers_compile_with_the_pool_in_place(topology: str, model: str) -> None:
    check(compile_steps(topology, model, 0, timeout_seconds=1700), model)
