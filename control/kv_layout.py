# SPDX-License-Identifier: Apache-2.0
"""What a process's KV cache looks like, and the comparison made when two processes meet.

Every field that shapes the bytes of a page, or decides which prompts a server accepts, is
here and is compared. A field that is not compared is a field on which two servers can
differ in silence.
"""

from typing import Any

import msgspec

LAYOUT_VERSION = 1


class LayoutMismatchError(ValueError):
    """Prefill and decode server do not hold the same kind of KV cache.

    Attributes:
      field: Name of the first field that differs.
      prefill_value: The prefill server's value.
      decode_value: The decode server's value.
    """

    def __init__(self, field: str, prefill_value: Any, decode_value: Any):
        """Names the field and both values.

        Args:
          field: Name of the field of `KVLayout` that differs.
          prefill_value: The prefill server's value.
          decode_value: The decode server's value.
        """
        super().__init__(
            f"KV layouts differ in {field}: the prefill server has {prefill_value!r}, the decode "
            f"server has {decode_value!r}; start both with the same model and settings"
        )
        self.field = field
        self.prefill_value = prefill_value
        self.decode_value = decode_value


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one process.

    Attributes:
      num_layers: Number of arrays (one per layer) that hold a page.
      page_size: Tokens per page.
      num_kv_heads: KV heads of the model, without padding.
      head_dim: Width of one head, without padding.
      dtype: Logical dtype of K and V, for example "bfloat16".
      storage_dtype: Dtype of the arrays that travel, for example "uint16" for the bits of
        bfloat16 on CPU.
      page_shape: Shape of one page of one layer as it travels, with any padding.
      page_buckets: Page counts to which a gather is padded, ascending. Both sides must pad
        alike, because the arrays that travel have the padded size.
      tp_size: Devices over which heads are cut.
      dp_size: Request-parallel replicas in the process.
      model_fingerprint: Hash over configuration and weights.
      max_context: Longest sequence that the server accepts, in tokens.
      state_parts: Names of further state that travels with the last chunk (draft model,
        hybrid layers), sorted. Empty for dense models.
      layout_version: Version of the meaning of these fields.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    storage_dtype: str
    page_shape: tuple[int, ...]
    page_buckets: tuple[int, ...]
    model_fingerprint: str
    max_context: int
    tp_size: int = 1
    dp_size: int = 1
    state_parts: tuple[str, ...] = ()
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
          ValueError: If a count is not positive, naming the field and its value.
        """
        counts = ("num_layers", "page_size", "num_kv_heads", "head_dim", "max_context")
        for name in (*counts, "tp_size", "dp_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"KVLayout.{name} must be at least 1, got {value}")
        if any(size < 1 for size in self.page_shape):
            raise ValueError(f"KVLayout.page_shape must be positive, got {self.page_shape}")
        if list(self.page_buckets) != sorted(set(self.page_buckets)) or not self.page_buckets:
            raise ValueError(
                f"KVLayout.page_buckets must be ascending and not empty, got {self.page_buckets}"
            )


def compare(prefill: KVLayout, decode: KVLayout) -> None:
    """Refuses a pair of layouts between which pages cannot be handed over unchanged.

    Args:
      prefill: Layout of the prefill server.
      decode: Layout of the decode server.

    Raises:
      LayoutMismatchError: If any field differs; names the first one and both values.
    """
    # The version first: with different versions the other fields may not mean the same.
    names = sorted(KVLayout.__struct_fields__, key=lambda name: name != "layout_version")
    for name in names:
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            raise LayoutMismatchError(name, ours, theirs)
