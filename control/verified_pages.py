# SPDX-License-Identifier: Apache-2.0
"""An end-to-end checksum of KV pages, from the prefill server's gather to the decode server's pool.

Transfer engines and networks can lose, mix or damage bytes without an error. `VerifiedPages` wraps
a pool: what it gathers carries one further array, the digests of the gathered pages, which travels
like the pages do. On the other side the pages are read back from the pool after they were written,
and their digests are compared. The digest depends on the contents of the pages and on their order,
not on where in a pool they lie.

It is computed on the device that holds the pages, by one pass over them; nothing is copied to the
host but one bit per chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvferry.control.connection import KVPages

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def page_digests(arrays: Sequence[jax.Array], count: jax.Array) -> jax.Array:
    """Computes the digests of pages; traceable.

    Two sums over the words of each array, of which the second weighs each word by an odd number
    that belongs to its place (as in Fletcher's checksum): a lost, stale, changed or exchanged page
    shows.

    Args:
        arrays: One per layer, each [n, ...] of a dtype of 1, 2 or 4 bytes.
        count: How many of the n pages count, scalar int32.

    Returns:
        [len(arrays), 2] uint32.
    """

    def digest(array: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize])
        words = words.reshape(words.shape[0], -1).astype(jnp.uint32)
        place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, 0) * np.uint32(words.shape[1])
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, 1)
        valid = jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) < count
        words = jnp.where(valid, words, jnp.uint32(0))
        weighted = words * (2 * place + 1)
        return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in (words, weighted)])

    return jnp.stack([digest(array) for array in arrays])


def _equal_digests(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.all(left == right, axis=1)


class VerifiedPages:
    """A pool of pages whose transfers carry digests; a `KVPages` around another one.

    Args:
        pages: The pool. Its `gather` is used on both sides.
    """

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages
        self._digests = jax.jit(page_digests, out_shardings=self._digest_spec(1).sharding)
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._equal: Callable[..., jax.Array] = jax.jit(_equal_digests)

    def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
        """Copies pages out of the pool; see `KVPages.gather`.

        Returns:
            The arrays of the wrapped pool, and their digests, [layers, 2] uint32.
        """
        arrays = self._pages.gather(page_ids)
        return [*arrays, self._digest(arrays, len(page_ids))]

    def scatter(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        """Copies pages into the pool; see `KVPages.scatter`. The last array is left out."""
        self._pages.scatter(arrays[:-1], page_ids)

    def specs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        """Returns what `gather` yields; see `KVPages.specs`."""
        return [*self._pages.specs(num_pages), self._digest_spec(num_pages)]

    def check(self, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> jax.Array:
        """Reads pages back after `scatter` and compares them with what was sent. Does not block.

        Args:
            arrays: As given to `scatter`.
            page_ids: Likewise.

        Returns:
            For each layer whether it holds what the other side gathered, [layers] bool.
        """
        held = self._pages.gather(page_ids)
        return self._equal(self._digest(held, len(page_ids)), arrays[-1])

    def warm_up(self, page_counts: Sequence[int]) -> None:
        """Compiles for these numbers of pages, so that no transfer waits for a compiler."""
        for count in page_counts:
            specs = self._pages.specs(count)
            number = jax.ShapeDtypeStruct((), jnp.int32)
            self._compiled[specs[0].shape[0]] = self._digests.lower(specs, number).compile()
        digests = self._digest_spec(1)
        self._equal = jax.jit(_equal_digests).lower(digests, digests).compile()

    def _digest(self, arrays: list[jax.Array], count: int) -> jax.Array:
        compute = self._compiled.get(arrays[0].shape[0], self._digests)
        result: jax.Array = compute(arrays, np.int32(count))
        return result

    def _digest_spec(self, num_pages: int) -> jax.ShapeDtypeStruct:
        specs = self._pages.specs(num_pages)
        sharding = specs[0].sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct((len(specs), 2), jnp.uint32, sharding=sharding)
