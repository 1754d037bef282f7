# SPDX-License-Identifier: Apache-2.0
"""Compiles whole steps for TPUs that the machine does not have; run by aot_test.py.

A program of its own, because the TPU compiler must be configured before jax is imported, and
because its library may be loaded by one process at a time.

Prints one JSON object per compilation: what the compiler says about memory and copies.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from typing import Any

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # nothing runs: compilations may share the machine
)

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.rope import RopeConfig
from kvferry.engine.sharding import TP_AXIS
from kvferry.engine.step import StepBuilder
from kvferry.engine.step_inputs import StepShape
from kvferry.kernels.multi_layer_copy import gather_pages, scatter_pages

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    max_context=8192,
    tie_embeddings=True,
)
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    max_context=8192,
)
MODELS = {"smollm2": (SMOLLM2, 1), "llama_8b": (LLAMA_8B, 4)}
NUM_PAGES = 1024
PAGE_SIZE = 64
SHAPES = (
    StepShape("prefill", 512, 8, 128),
    StepShape("decode", 16, 16, 128),
)


def main(argv: list[str]) -> None:
    """Compiles one model for one topology.

    Args:
        argv: Program name, topology name, name in MODELS, number of layers (0 for all).
    """
    topology, name, layers = argv[1], argv[2], int(argv[3])
    config, shards = MODELS[name]
    if layers:
        config = dataclasses.replace(config, num_layers=layers)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:shards]), (TP_AXIS,))
    layout = KVPoolLayout.for_model(
        config, page_size=PAGE_SIZE, dtype="bfloat16", platform="tpu", shards=shards
    )
    builder = StepBuilder(config=config, layout=layout, platform="tpu", mesh=mesh)
    # The kernel's lowering rules ask for the current device.
    with jax.set_mesh(mesh):
        for shape in SHAPES:
            traced = builder.trace_step(shape, NUM_PAGES, "bfloat16")
            report(f"{topology} {name} {shape.label}", traced, layout)
        if shards > 1:  # the copy kernels' own tests cover one device
            report_copies(f"{topology} {name}", builder, layout, mesh)


def report_copies(label: str, builder: StepBuilder, layout: KVPoolLayout, mesh: Mesh) -> None:
    """Compiles the pool's gather and scatter of 16 pages."""
    pool = builder.pool_structs(NUM_PAGES)
    pages = builder.pool_structs(16)
    ids = jax.ShapeDtypeStruct((16,), np.int32, sharding=builder.replicated)
    count = jax.ShapeDtypeStruct((1,), np.int32, sharding=builder.replicated)
    options: dict[str, Any] = {
        "mesh": mesh,
        "sharding_spec": pool[0].sharding.spec,
        "implementation": "mosaic_tpu",
    }
    gather = jax.jit(lambda pool, ids, count: gather_pages(pool, ids, count, **options))
    report(f"{label} gather", gather.trace(pool, ids, count), layout)
    scatter = jax.jit(
        lambda pool, pages, ids, count: scatter_pages(pages, pool, ids, count, **options),
        donate_argnums=0,
    )
    report(f"{label} scatter", scatter.trace(pool, pages, ids, count), layout)


def report(label: str, traced: Any, layout: KVPoolLayout) -> None:
    """Compiles and prints the facts that the test asserts."""
    start = time.monotonic()
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # libtpu knows instructions (SparseCore's, on tpu7x) that jaxlib cannot print.
        text, unprintable = "", str(error)[:200]
    else:
        unprintable = ""
    page_rows, heads, dim = layout.page_shape
    heads //= layout.shards
    # The pool in its own shape, or as the rows that a step writes.
    pool_shapes = (
        f"[{NUM_PAGES},{page_rows},{heads},{dim}]",
        f"[{NUM_PAGES * page_rows},{heads},{dim}]",
    )
    copies = [
        line.strip()[:200]
        for line in text.splitlines()
        if re.search(r" copy(-start)?\(", line) and any(s in line for s in pool_shapes)
    ]
    print(
        json.dumps(
            {
                "label": label,
                "seconds": round(time.monotonic() - start, 1),
                "pool_bytes": NUM_PAGES * layout.page_bytes // layout.shards,
                "alias_bytes": memory.alias_size_in_bytes,
                "temp_bytes": memory.temp_size_in_bytes,
                "pool_copies": copies,
                "kernels": text.count("tpu_custom_call"),
                "unprintable": unprintable,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv)
