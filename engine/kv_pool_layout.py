# SPDX-License-Identifier: Apache-2.0
"""What one page of the KV pool looks like, and how that follows from model and platform."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvferry.engine.model_config import ModelConfig

KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_LANES = 128  # width of a TPU vector register: the last dimension of anything it tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPoolLayout:
    """What one page of the pool looks like.

    Attributes:
        num_layers: Arrays in the pool.
        page_size: Tokens per page.
        kv_heads: KV heads of the model, over all shards.
        head_dim: Size of a head in the model.
        dtype: Name of the dtype that the values have, for example `bfloat16`.
        storage_dtype: Name of the dtype of the arrays: `dtype`, or an unsigned integer of the
            same width that carries its bits.
        padded_kv_heads: KV heads in the arrays, over all shards; each shard's padding follows
            its real heads.
        padded_head_dim: Size of a head in the arrays.
        shards: Ways in which the head dimension is split (tensor parallelism).
    """

    num_layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    storage_dtype: str
    padded_kv_heads: int
    padded_head_dim: int
    shards: int = 1

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of one page of one layer: [page_size, 2 * kv_heads, head_dim], padded."""
        return (self.page_size, 2 * self.padded_kv_heads, self.padded_head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers and shards together."""
        values = self.num_layers * int(np.prod(self.page_shape))
        return values * jnp.dtype(self.storage_dtype).itemsize

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        page_size: int,
        dtype: str,
        platform: str,
        shards: int = 1,
    ) -> KVPoolLayout:
        """Chooses the layout of a model's pool.

        Args:
            config: The model.
            page_size: Tokens per page.
            dtype: One of KV_DTYPES.
            platform: Where the pool lives.
            shards: Tensor-parallel size.

        Returns:
            The layout.

        Raises:
            ValueError: `page_size` is not positive, `dtype` is not one of KV_DTYPES, or
                `shards` does not divide the KV heads.
        """
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        if dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype must be one of {', '.join(KV_DTYPES)}, got {dtype!r}")
        if shards <= 0 or config.num_kv_heads % shards:
            raise ValueError(
                f"cannot split {config.num_kv_heads} KV heads over {shards} devices; choose a "
                "tensor-parallel size that divides the number of KV heads"
            )
        local_heads, head_dim, storage = config.num_kv_heads // shards, config.head_dim, dtype
        item_bytes = jnp.dtype(dtype).itemsize
        if platform == "tpu":
            local_heads = _tileable_heads(local_heads, item_bytes)
            head_dim = -(-head_dim // _LANES) * _LANES
        elif platform == "cpu" and dtype not in ("float32", "float16"):
            storage = f"uint{8 * item_bytes}"
        return cls(
            num_layers=config.num_layers,
            page_size=page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            storage_dtype=storage,
            padded_kv_heads=local_heads * shards,
            padded_head_dim=head_dim,
            shards=shards,
        )


def _tileable_heads(heads: int, item_bytes: int) -> int:
    """Returns the next head count whose K and V rows fill whole TPU tiles.

    The attention kernel asks that 2 * heads / packing be 1, 2, 4, 8 or a multiple of 8, where
    packing is how many values share a 32-bit register lane.
    """
    packing = 4 // item_bytes
    while True:
        sublanes, rest = divmod(2 * heads, packing)
        if not rest and (sublanes in (1, 2, 4) or (sublanes and sublanes % 8 == 0)):
            return heads
        heads += 1
