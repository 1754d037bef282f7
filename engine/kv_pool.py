# SPDX-License-Identifier: Apache-2.0
"""The paged pool of keys and values, and the movement of whole pages in and out of it.

One array per layer, [num_pages, page_size, 2 * kv_heads, head_dim], K and V of each head next to
each other (K0, V0, K1, V1, ...): what JAX's ragged paged attention kernel reads. A page is the
leading dimension, so the copy kernels move it as one block.

Two things are settled once, when the pool is made:

* On TPU the head count and the head size are padded to what the attention kernel can tile
  (SmolLM2: 3 heads of 64 become 4 of 128). Nothing is padded per step but the new rows.
* On CPU a pool of bfloat16 or float8 holds the bits as unsigned integers: XLA's CPU backend
  would convert the whole pool to float32 and back at every scatter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.sharding import TP_AXIS
from kvferry.engine.trace_counter import TraceCounter
from kvferry.kernels.multi_layer_copy import gather_pages, scatter_pages

CopyKind = Literal["gather", "scatter"]

_MAX_BUCKET_GROWTH = 3  # buckets 1, 2, 3, 4, 6, 8, 12, ...: at most 1/3 of a bucket is padding


def page_buckets(max_pages: int) -> tuple[int, ...]:
    """Returns the page counts for which gathers and scatters are compiled.

    Args:
        max_pages: Largest count that must fit.

    Returns:
        1, 2, 3, 4, 6, 8, 12, 16, ... up to `max_pages`, which is always the last one.

    Raises:
        ValueError: `max_pages` is not positive.
    """
    if max_pages <= 0:
        raise ValueError(f"max_pages must be positive, got {max_pages}")
    sizes = {max_pages}
    power = 1
    while power < max_pages:
        sizes.add(power)
        if power >= 2 and power // 2 * _MAX_BUCKET_GROWTH < max_pages:
            sizes.add(power // 2 * _MAX_BUCKET_GROWTH)
        power *= 2
    return tuple(sorted(sizes))


class KVPool:
    """The pool's arrays. They are rebound at every step: only the step thread may touch them."""

    def __init__(
        self, layout: KVPoolLayout, num_pages: int, sharding: Sharding, max_copy_pages: int
    ) -> None:
        """Allocates the pool, filled with zeros.

        Args:
            layout: What a page looks like.
            num_pages: Pages in the pool.
            sharding: Where each array lives.
            max_copy_pages: Largest number of pages that one gather or scatter moves.

        Raises:
            ValueError: `num_pages` or `max_copy_pages` is not positive.
        """
        if num_pages <= 0:
            raise ValueError(f"num_pages must be positive, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.sharding = sharding
        self.buckets = page_buckets(min(max_copy_pages, num_pages))
        self._traces = TraceCounter()
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        device: Any = next(iter(sharding.device_set))
        self._copy_options: dict[str, Any] = {
            "mesh": mesh,
            "sharding_spec": sharding.spec if isinstance(sharding, NamedSharding) else None,
            "implementation": "mosaic_tpu" if device.platform == "tpu" else "xla",
        }
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}
        shape = (num_pages, *layout.page_shape)
        allocate = jax.jit(
            lambda: jnp.zeros(shape, layout.storage_dtype), out_shardings=self.sharding
        )
        self.arrays: list[jax.Array] = [allocate() for _ in range(layout.num_layers)]

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: str,
        mesh: Mesh | None = None,
        *,
        device: jax.Device | None = None,
        max_copy_pages: int | None = None,
    ) -> KVPool:
        """Makes the pool of a model.

        Args:
            config: The model.
            num_pages: Pages in the pool.
            page_size: Tokens per page.
            dtype: One of KV_DTYPES.
            mesh: Devices to split the heads over, along the axis TP_AXIS; None for one device.
            device: The one device, without a mesh; None for the default one.
            max_copy_pages: Largest number of pages that one gather or scatter moves; None for
                the pages of the longest sequence.

        Returns:
            The pool.

        Raises:
            ValueError: A size or the dtype is not usable; see KVPoolLayout.for_model.
        """
        layout = KVPoolLayout.for_model(
            config,
            page_size=page_size,
            dtype=dtype,
            platform=first_device(mesh, device).platform,
            shards=1 if mesh is None else mesh.shape[TP_AXIS],
        )
        if max_copy_pages is None:
            max_copy_pages = -(-config.max_context // page_size)
        return cls(layout, num_pages, pool_sharding(mesh, device), max_copy_pages)

    @property
    def num_traces(self) -> int:
        """Copies traced so far."""
        return self._traces.count

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers and shards together."""
        return self.layout.page_bytes

    def bucket(self, num_pages: int) -> int:
        """Returns the number of pages that a copy of `num_pages` pages is padded to.

        Args:
            num_pages: Pages to move.

        Returns:
            The smallest bucket that holds them.

        Raises:
            ValueError: `num_pages` is not positive or more than the largest bucket.
        """
        for size in self.buckets:
            if 0 < num_pages <= size:
                return size
        raise ValueError(f"one copy moves 1 to {self.buckets[-1]} pages, got {num_pages}")

    def specs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        """Describes what `gather` of this many pages returns.

        Args:
            num_pages: Pages to move.

        Returns:
            One spec per layer, [bucket, *page_shape], with its sharding.

        Raises:
            ValueError: See `bucket`.
        """
        shape = (self.bucket(num_pages), *self.layout.page_shape)
        dtype = jnp.dtype(self.layout.storage_dtype)
        spec = jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)
        return [spec] * self.layout.num_layers

    def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
        """Copies pages out of the pool. Dispatches and returns; the pool is not copied.

        Args:
            page_ids: Which pages, in the order wanted.

        Returns:
            One array per layer, [bucket, *page_shape]; what lies behind the pages asked for is
            unspecified.

        Raises:
            ValueError: Too many or no pages, or one that is not in the pool.
        """
        ids, count = self._ids(page_ids)
        result: list[jax.Array] = self._copy("gather", len(ids))(self.arrays, ids, count)
        return result

    def scatter(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        """Copies pages into the pool, in place. Dispatches and returns.

        Args:
            arrays: One per layer, shaped as `specs(len(page_ids))` says.
            page_ids: Which pages to overwrite, none twice.

        Raises:
            ValueError: Too many or no pages, one that is not in the pool or is given twice, or
                an array of another shape or dtype.
        """
        ids, count = self._ids(page_ids)
        if len(set(page_ids)) != len(page_ids):
            raise ValueError(f"pages to overwrite must differ, got {list(page_ids)}")
        specs = self.specs(len(page_ids))
        if len(arrays) != len(specs):
            raise ValueError(f"expected arrays for {len(specs)} layers, got {len(arrays)}")
        for layer, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
            if array.shape != spec.shape or array.dtype != spec.dtype:
                raise ValueError(
                    f"layer {layer}: expected {spec.dtype}{list(spec.shape)}, got "
                    f"{array.dtype}{list(array.shape)}"
                )
        self.arrays = self._copy("scatter", len(ids))(self.arrays, list(arrays), ids, count)

    def warm_up_tasks(self, kinds: Sequence[CopyKind]) -> list[tuple[str, Callable[[], None]]]:
        """Lists the compilations that `gather` and `scatter` need.

        Args:
            kinds: `gather`, `scatter` or both.

        Returns:
            Labels and thunks; each thunk compiles one shape and may run on any thread.
        """
        return [
            (f"{kind} {size} pages", functools.partial(self._compile, kind, size))
            for kind in kinds
            for size in self.buckets
        ]

    def _ids(self, page_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        count = len(page_ids)
        ids = np.zeros(self.bucket(count), np.int32)
        ids[:count] = page_ids
        if ids.min() < 0 or ids.max() >= self.num_pages:
            raise ValueError(f"page ids must be in [0, {self.num_pages}), got {list(page_ids)}")
        return ids, np.array([count], np.int32)

    def _copy(self, kind: CopyKind, size: int) -> Callable[..., Any]:
        if (kind, size) not in self._compiled:
            self._compile(kind, size)
        return self._compiled[kind, size]

    def _compile(self, kind: CopyKind, size: int) -> None:
        pool_spec = jax.ShapeDtypeStruct(
            (self.num_pages, *self.layout.page_shape),
            jnp.dtype(self.layout.storage_dtype),
            sharding=self.sharding,
        )
        pool = [pool_spec] * self.layout.num_layers
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
        count = jax.ShapeDtypeStruct((1,), jnp.int32)
        if kind == "gather":
            traced = jax.jit(self._gather).trace(pool, ids, count)
        else:
            traced = jax.jit(self._scatter, donate_argnums=0).trace(
                pool, self.specs(size), ids, count
            )
        self._compiled[kind, size] = traced.lower().compile()

    def _gather(self, pool: list[jax.Array], ids: jax.Array, count: jax.Array) -> list[jax.Array]:
        self._traces.add()
        return gather_pages(pool, ids, count, **self._copy_options)

    def _scatter(
        self, pool: list[jax.Array], arrays: list[jax.Array], ids: jax.Array, count: jax.Array
    ) -> list[jax.Array]:
        self._traces.add()
        return scatter_pages(arrays, pool, ids, count, **self._copy_options)


def pool_sharding(mesh: Mesh | None, device: jax.Device | None) -> Sharding:
    """Returns the sharding of a pool array and of pages gathered from it.

    Args:
        mesh: Devices to split the heads over; None for one device.
        device: The one device, without a mesh.

    Returns:
        The sharding.
    """
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec(None, None, TP_AXIS, None))
    return SingleDeviceSharding(first_device(mesh, device))


def first_device(mesh: Mesh | None, device: jax.Device | None) -> jax.Device:
    """Returns a device that stands for all that the pool lives on.

    Args:
        mesh: Devices, or None for one.
        device: The one device, without a mesh; None for JAX's first one.

    Returns:
        The device.
    """
    if mesh is not None:
        found: jax.Device = mesh.devices.flat[0]
        return found
    return device or jax.local_devices()[0]
