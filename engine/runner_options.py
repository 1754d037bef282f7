# SPDX-License-Identifier: Apache-2.0
"""Settings of the model runner, and the defaults that follow from model and machine."""

from __future__ import annotations

import dataclasses

import jax
from absl import logging
from jax.sharding import Mesh

from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.sharding import TP_AXIS

_DEFAULT_PAGE_SIZE = {"cpu": 16, "tpu": 64}
_SMALLEST_PREFILL_TOKENS = 32
_PREFILL_GROWTH = 4
# Of what is free when the weights are loaded.
_DEVICE_MEMORY_FRACTION = 0.85
# A host is shared with everything else that runs. And a fixed size keeps the shapes of the compiled
# steps the same from start to start, so that they are found in the compilation cache.
_HOST_KV_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """What an operator may choose; None means: derive it.

    Attributes:
        max_running_requests: Largest decode batch.
        chunk_tokens: Largest number of prompt tokens in one step.
        max_prefill_sequences: Largest number of sequences in one prefill step; never more than
            `max_running_requests`.
        max_context: Longest sequence in tokens; None for the model's own limit, and never more.
        page_size: Tokens per page; None for 16 on CPU and 64 on TPU.
        num_pages: Pages in the pool; None for what `kv_memory_bytes` holds, but never more than
            `max_running_requests` sequences of `max_context` tokens can use.
        kv_memory_bytes: Memory for the pool, per device; None for 1 GiB on CPU (more if one
            longest sequence needs it) and 85 % of the free memory on an accelerator.
        kv_dtype: Dtype of keys and values; None for the dtype of the weights.
        mesh: Devices for tensor parallelism, with an axis TP_AXIS; None for one device.
        device: The one device, without a mesh; None for the default one.
    """

    max_running_requests: int = 16
    chunk_tokens: int = 512
    max_prefill_sequences: int = 8
    max_context: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_memory_bytes: int | None = None
    kv_dtype: str | None = None
    mesh: Mesh | None = None
    device: jax.Device | None = None

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: A number that is given is not positive, or the mesh has no TP_AXIS.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value <= 0:
                raise ValueError(f"{field.name} must be positive, got {value}")
        if self.mesh is not None and TP_AXIS not in self.mesh.axis_names:
            raise ValueError(f"the mesh needs an axis {TP_AXIS!r}, got {self.mesh.axis_names}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSizes:
    """The options with every default filled in.

    Attributes:
        max_context: Longest sequence in tokens.
        max_pages: Pages of the longest sequence.
        num_pages: Pages in the pool.
        prefill_tokens: Row counts of the prefill family, ascending.
        prefill_sequences: Sequences in one prefill step.
        decode_batches: Batch sizes of the decode family, ascending.
    """

    max_context: int
    max_pages: int
    num_pages: int
    prefill_tokens: tuple[int, ...]
    prefill_sequences: int
    decode_batches: tuple[int, ...]


def default_page_size(platform: str) -> int:
    """Returns the page size in tokens when none is asked for.

    Args:
        platform: `cpu`, `tpu` or another JAX platform name.

    Returns:
        Tokens per page.
    """
    return _DEFAULT_PAGE_SIZE.get(platform, _DEFAULT_PAGE_SIZE["tpu"])


def resolve_sizes(
    options: RunnerOptions, config: ModelConfig, layout: KVPoolLayout, device: jax.Device
) -> RunnerSizes:
    """Fills in what the options leave open.

    Args:
        options: What the operator chose.
        config: The model.
        layout: Layout of the pool.
        device: A device of the pool, weights loaded.

    Returns:
        All sizes.

    Raises:
        ValueError: The pool does not hold even one sequence of `max_context` tokens.
    """
    max_context = min(options.max_context or config.max_context, config.max_context)
    max_pages = -(-max_context // layout.page_size)
    useful = options.max_running_requests * max_pages
    if options.num_pages is not None:
        num_pages, origin = options.num_pages, "num_pages"
    else:
        page_bytes = layout.page_bytes // layout.shards
        budget = options.kv_memory_bytes or _default_kv_bytes(device, max_pages * page_bytes)
        num_pages = min(useful, budget // page_bytes)
        origin = f"{budget / 2**20:.0f} MiB at {page_bytes} bytes a page"
    if num_pages < max_pages:
        raise ValueError(
            f"the KV pool has {num_pages} pages ({origin}), but one sequence of {max_context} "
            f"tokens needs {max_pages} pages of {layout.page_size} tokens; give the pool more "
            "memory or pages, or lower the context limit"
        )
    logging.info(
        "KV pool: %d pages of %d tokens, %.1f MiB (%s), context %d",
        *(num_pages, layout.page_size, num_pages * layout.page_bytes / 2**20, origin),
        max_context,
    )
    return RunnerSizes(
        max_context=max_context,
        max_pages=max_pages,
        num_pages=num_pages,
        prefill_tokens=_prefill_tokens(min(options.chunk_tokens, max_context)),
        prefill_sequences=min(options.max_prefill_sequences, options.max_running_requests),
        decode_batches=_decode_batches(options.max_running_requests),
    )


def _default_kv_bytes(device: jax.Device, longest_bytes: int) -> int:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return max(_HOST_KV_BYTES, longest_bytes)
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return int(free * _DEVICE_MEMORY_FRACTION)


def _prefill_tokens(largest: int) -> tuple[int, ...]:
    sizes = []
    size = _SMALLEST_PREFILL_TOKENS
    while size < largest:
        sizes.append(size)
        size *= _PREFILL_GROWTH
    return (*sizes, largest)


def _decode_batches(largest: int) -> tuple[int, ...]:
    # No shape for two: the weights are read once either way, two rows cost nearly what four do.
    sizes = [1] if largest > 1 else []
    size = 4
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)
