# SPDX-License-Identifier: Apache-2.0
"""Named shapes that tests, benchmarks and the compile report share."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from kvferry.kernels import layouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
    """Shapes of one copy between a pool and contiguous pages.

    Attributes:
      name: says the model, the dtype and what is special.
      layers: number of layers.
      page: shape of one page of one layer.
      dtype: of the arrays, as they are held (see docs/kernels.md on CPU).
      pool_pages: pages of the pool.
      pages: pages that are copied.
    """

    name: str
    layers: int
    page: tuple[int, ...]
    dtype: str
    pool_pages: int = 1024
    pages: int = 512

    @property
    def layer_bytes(self) -> int:
        """Bytes that are copied in one layer."""
        return self.pages * math.prod(self.page) * np.dtype(jnp.dtype(self.dtype)).itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes that are copied in all layers."""
        return self.layers * self.layer_bytes


# SmolLM2-135M as the engine holds it on CPU: pages of 16 tokens, K and V of 3 heads of 64.
_SMOLLM2_PAGE = (16, 6, 64)
CPU = [
    ArgSpec(name="smollm2 bfloat16 as uint16", layers=30, page=_SMOLLM2_PAGE, dtype="uint16"),
    ArgSpec(name="smollm2 float8 as uint8", layers=30, page=_SMOLLM2_PAGE, dtype="uint8"),
    ArgSpec(name="smollm2 int8", layers=30, page=_SMOLLM2_PAGE, dtype="int8"),
    ArgSpec(name="smollm2 float16", layers=30, page=_SMOLLM2_PAGE, dtype="float16"),
    ArgSpec(name="smollm2 float32", layers=30, page=_SMOLLM2_PAGE, dtype="float32"),
]

TPU = [
    ArgSpec(name="llama3-8b bfloat16", layers=32, page=(16, 16, 128), dtype="bfloat16"),
    ArgSpec(name="llama3-8b float8_e4m3fn", layers=32, page=(16, 16, 128), dtype="float8_e4m3fn"),
    ArgSpec(name="deepseek latent bfloat16", layers=61, page=(64, 640), dtype="bfloat16"),
    ArgSpec(name="smollm2 packed bfloat16", layers=30, page=(48, 128), dtype="bfloat16"),
]

# The layouts that are promised to move in place: what `make kernels-report` compiles.
_PAGE_TOKENS = 16
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_KV_HEADS = (1, 3, 8, 32)
# float16 is held as its bits.
DTYPES = ("bfloat16", "float32", "uint16", "int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageLayout:
    """A page and what it holds.

    Attributes:
      holds: for whom it is, in words.
      page: shape of the page.
      dtype: of the pool.
    """

    holds: str
    page: tuple[int, ...]
    dtype: str


def _page(natural: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Returns the natural page shape if it moves in place, else the packed one."""
    numpy_dtype = np.dtype(jnp.dtype(dtype))
    if layouts.moves_in_place((1, *natural), numpy_dtype):
        return natural
    packed = layouts.page_shape_for(math.prod(natural), numpy_dtype)
    assert packed is not None, natural  # 16 tokens of whole heads always pack
    return packed


def page_layouts() -> list[PageLayout]:
    """Lists every layout that is promised to move in place, equal page shapes merged.

    Returns:
      Layouts of pages of 16 tokens, natural where that moves in place and packed elsewhere.
    """
    held: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for dtype in DTYPES:
        for head_dim in _HEAD_DIMS:
            for heads in _KV_HEADS:
                page = _page((_PAGE_TOKENS, 2 * heads, head_dim), dtype)
                held.setdefault((page, dtype), []).append(f"{heads}x{head_dim}")
        for latent in (576, 640):
            page = _page((_PAGE_TOKENS, latent), dtype)
            held.setdefault((page, dtype), []).append(f"latent {latent}")
    return [
        PageLayout(holds=", ".join(names), page=page, dtype=dtype)
        for (page, dtype), names in held.items()
    ]
