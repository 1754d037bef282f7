# SPDX-License-Identifier: Apache-2.0
"""Known arrays that travel before real ones do: in the self-test, and first of all from a peer.

Their bytes are random but follow from a seed, so both ends can make them. A second peer that
answers in the place of the one meant has another seed.
"""

import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from kvferry.control.engines.base import (
    EngineStartError,
    Spec,
    TransferEngine,
    TransferError,
    sharding_of,
)
from kvferry.control.engines.staging import StagingEngine
from kvferry.control.ids import IdSource

_CANARY_DTYPES = ("bfloat16", "float32", "uint16")
_CANARY_SHAPE = (2, 3, 64)
_SELF_TEST_ROUNDS = 4
_SELF_TEST_SECONDS = 20.0
_SELF_TEST_MOST_BYTES = 80 << 20
_ODD_BYTES = 4097


def canary_specs() -> list[Spec]:
    """Returns what the canary of a connection looks like."""
    return [jax.ShapeDtypeStruct(_CANARY_SHAPE, dtype) for dtype in _CANARY_DTYPES]


def make_canary(seed: str, specs: Sequence[Spec]) -> list[jax.Array]:
    """Makes arrays whose bytes follow from `seed`.

    Args:
        seed: Any text.
        specs: Shape, dtype and sharding of each.

    Returns:
        One array per spec, each with its own bytes.
    """
    return [
        jax.device_put(_pattern(seed, index, spec), sharding_of(spec))
        for index, spec in enumerate(specs)
    ]


def check_canary(seed: str, arrays: Sequence[jax.Array]) -> None:
    """Compares pulled canary arrays, bit by bit, with what they must be.

    Args:
        seed: As given to `make_canary`.
        arrays: What was pulled.

    Raises:
        TransferError: If any differs; names it.
    """
    for index, array in enumerate(arrays):
        expected = _pattern(seed, index, jax.ShapeDtypeStruct(array.shape, array.dtype))
        if np.asarray(array).tobytes() != expected.tobytes():
            raise TransferError(
                f"test array {index} ({array.dtype}{list(array.shape)}) arrived with other bytes"
                " than were sent"
            )


def self_test(engine: TransferEngine, address: str, specs: Sequence[Spec]) -> None:
    """Moves known arrays from the process to itself, several times over fresh ids.

    The first time one of them is larger than what the engine sends as one piece. With a staging
    engine the last ones are a set of pages, which goes through host memory as real pages do.

    Args:
        engine: A started engine.
        address: What its `start` returned.
        specs: Arrays as the process will move them, sharding included; dtypes that a connection's
            canary has are added.

    Raises:
        EngineStartError: If they do not arrive, or arrive changed.
    """
    ids = IdSource()
    everything = [*specs, *canary_specs()]
    pieces = min(engine.options.chunk_bytes + _ODD_BYTES, _SELF_TEST_MOST_BYTES)
    rounds = [[*everything, jax.ShapeDtypeStruct((pieces,), np.uint8)]]
    rounds += [everything] * (_SELF_TEST_ROUNDS - 1)
    if isinstance(engine, StagingEngine):
        rounds.append(engine.smallest_pages)
    for number, wanted in enumerate(rounds):
        _move_to_self(engine, address, ids.next_id(), f"self-test {number}", wanted)


def _move_to_self(
    engine: TransferEngine, address: str, key: int, seed: str, specs: Sequence[Spec]
) -> None:
    # New connections each time: of two servers on one port, each connection gets either.
    engine.disconnect(address)
    try:
        engine.publish(key, make_canary(seed, specs), _SELF_TEST_SECONDS)
        pull = engine.pull(address, key, specs, _SELF_TEST_SECONDS)
        pull.wait(_SELF_TEST_SECONDS + 1.0)
        check_canary(seed, pull.result())
    except TransferError as error:
        engine.release(key, delivered=False)
        raise EngineStartError(
            f"the self-test of transfer engine {engine.engine_name!r} at {address} failed:"
            f" {error}. Another process may use the same port, or this machine cannot use"
            " this engine; choose another port or --transfer_engine"
        ) from error
    engine.release(key, delivered=True)


def _pattern(seed: str, index: int, spec: Spec) -> np.ndarray:
    count = int(np.prod(spec.shape)) * spec.dtype.itemsize
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=16).digest()
    raw = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little"))).bytes(count)
    return np.frombuffer(raw, np.uint8).view(spec.dtype).reshape(spec.shape)
