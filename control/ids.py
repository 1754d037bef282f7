# SPDX-License-Identifier: Apache-2.0
"""One-shot ids for transfers and published chunks, and the identity of a process.

An id is a capability: whoever knows it may pull the pages behind it. It must therefore be
unguessable, it must never come twice, and a message that carries the id of a process that is no
more must be recognised as such. JSON numbers and some routers carry 53 bits, hence the bound.
"""

import hashlib
import secrets
import threading
import time

ID_BITS = 53
_GENERATION_BITS = 13
_HALF_BITS = (ID_BITS - _GENERATION_BITS) // 2
_HALF_MASK = (1 << _HALF_BITS) - 1
_ROUNDS = 4


def generation_of(identifier: int) -> int:
    """Returns the generation tag that `IdSource.next_id` put into an id."""
    return identifier >> (2 * _HALF_BITS)


def new_instance_id() -> str:
    """Returns an unguessable name for this run of this process: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def new_generation() -> int:
    """Returns a number that grows from one start of a process to the next: milliseconds, Unix."""
    return time.time_ns() // 1_000_000


class IdSource:
    """Makes ids below 2**53 that never repeat and cannot be predicted. Thread-safe.

    A counter is sent through a keyed permutation (a Feistel network over BLAKE2b): a permutation
    cannot collide, which random numbers of this width would after about a million draws, and
    without the key its next value cannot be told from a random one.

    Attributes:
        generation: Tag of this source, in the upper bits of each of its ids.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self.generation = secrets.randbelow((1 << _GENERATION_BITS) - 1) + 1
        self._counter = secrets.randbits(2 * _HALF_BITS)
        self._lock = threading.Lock()

    def next_id(self) -> int:
        """Returns a new id, positive and below 2**53."""
        with self._lock:
            self._counter = (self._counter + 1) & ((1 << (2 * _HALF_BITS)) - 1)
            counter = self._counter
        left, right = counter >> _HALF_BITS, counter & _HALF_MASK
        for index in range(_ROUNDS):
            left, right = right, left ^ self._round(index, right)
        return (self.generation << (2 * _HALF_BITS)) | (left << _HALF_BITS) | right

    def owns(self, identifier: int) -> bool:
        """Returns whether an id carries this source's generation."""
        return generation_of(identifier) == self.generation

    def _round(self, index: int, half: int) -> int:
        data = bytes([index]) + half.to_bytes(4, "little")
        digest = hashlib.blake2b(data, key=self._key, digest_size=4).digest()
        return int.from_bytes(digest, "little") & _HALF_MASK
