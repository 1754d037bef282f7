# SPDX-License-Identifier: Apache-2.0
"""Named shapes that tests and benchmarks share."""

from __future__ import annotations

from kvferry.kernels.multi_layer_copy.arg_specs import ArgSpec

# Slots of 64 pages: what compiles in seconds on TPU, see docs/kernels.md.
CPU = [
    ArgSpec(
        name="smollm2 bfloat16 as uint16", layers=30, page=(16, 6, 64), dtype="uint16", pages=64
    ),
    ArgSpec(name="smollm2 float32", layers=30, page=(16, 6, 64), dtype="float32", pages=64),
]

TPU = [
    ArgSpec(name="llama3-8b bfloat16", layers=32, page=(16, 16, 128), dtype="bfloat16", pages=64),
    ArgSpec(name="smollm2 packed bfloat16", layers=30, page=(48, 128), dtype="bfloat16", pages=64),
]
