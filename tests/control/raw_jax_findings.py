# SPDX-License-Identifier: Apache-2.0
"""What `jax.experimental.transfer` does in the scenarios of raw_jax_transfer.py, line by line.

The letter of a line: S silent wrong data, A abort or crash, W a wedge until a restart, H a hang.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Raw:
    """What the library does.

    Attributes:
        shows: The finding in words.
        guard: What guards against it.
        saw: What the puller saw.
        puller: How the puller ended.
        publisher: How the publisher ended.
    """

    shows: str
    guard: str
    saw: Sequence[str] = ()
    puller: str = "ends"
    publisher: str = "ends"


# Between these versions it was not tried.
_DELETED_IS_ERROR = jax.__version_info__ >= (0, 12)
_SETTINGS = "JaxEngine.settings, compared in peer.check_fit"
_LEAVES = "leaves in KVChunk, compared in DecodeDesk"
_SHARDS = "shard_plan, compared in peer.check_fit"
_FLAT = "no use of _pull_into_flat"
_DEADLINE = "the deadline in JaxPull.wait"

RAW: Mapping[str, Raw] = {
    "S1": Raw(
        "with another transfer size at each end later pulls return other bytes",
        _SETTINGS,
        ["other bytes", "arrived"],
    ),
    "S2": Raw("another shape or dtype of as many bytes is taken", _LEAVES, ["arrived"] * 3),
    "S3": Raw("another cut into as large shards gives other bytes", _SHARDS, ["other bytes"]),
    "S4": Raw("fewer shards shift all that follow", _SHARDS, ["arrived"]),
    "S5": Raw("a spec that is too small gets the head of the array", _LEAVES, ["arrived"]),
    "S6": Raw("memory layouts are ignored", "_check_publishable", ["other bytes"]),
    "S7": Raw("raw buffers that are donated arrive changed", "no raw buffers", ["other bytes"]),
    "S8": Raw("a second publication replaces the first", "publish", ["other bytes", "hangs"]),
    "S9": Raw("two servers share a port, and its connections", "claim_port", ["arrived", "hangs"]),
    "S10": Raw("host names become a wildcard", "check_advertise", ["0.0.0.0", "0.0.0.0"]),
    "S11": Raw("a pull into an array that is being computed is lost", _FLAT, ["other bytes"]),
    "A1": Raw("no transport addresses: abort", "EngineOptions.channels", publisher="crashes"),
    "A2": Raw("more transports at the publisher: abort", _SETTINGS, puller="crashes"),
    "A3": Raw("four zero bytes abort a publisher", "a warning", publisher="crashes"),
    "A4": Raw(
        "a deleted array crashes the publisher (jax 0.10), or is an error (jax 0.12)",
        "_check_publishable",
        ["INVALID_ARGUMENT: Cannot remote transfer non-pjrt arrays."] if _DELETED_IS_ERROR else [],
        publisher="ends" if _DELETED_IS_ERROR else "crashes",
    ),
    "A5": Raw("a pull into a slice that is too small: abort", _FLAT, puller="crashes"),
    "A5_DELETED": Raw("a pull into a deleted array: crash", _FLAT, puller="crashes"),
    "A6": Raw(
        "a thread that waits in an array when the program ends: abort",
        "JaxEngine.close",
        puller="crashes",
    ),
    "W1": Raw("each spec that is too small costs a receive buffer", "ReceiveWatch", ["hangs"]),
    "W2": Raw("poison in mid-transfer costs receive buffers", "poison_if_safe", ["hangs"]),
    "W3": Raw("a puller that stops blocks all others", _DEADLINE, ["hangs", "arrived"]),
    "W4": Raw(
        "pullers that die cost a publisher its staging copies", "COPIES_PER_CHANNEL", ["hangs"]
    ),
    "H1": Raw(
        "what is not published, or was pulled before, never ends",
        _DEADLINE,
        ["arrived", "hangs", "hangs"],
    ),
    "H2": Raw("connect succeeds where nothing listens", "JaxEngine._connect", ["hangs"]),
    "H3": Raw("arrays without elements never arrive", "JaxEngine.pull", ["arrived", "hangs"]),
    "H4": Raw("of 70 arrays asked for, 5 too many never end", _LEAVES, ["arrived", "hangs"]),
    "H5": Raw("a timeout is not looked at while the publisher is frozen", _DEADLINE, ["hangs"]),
    "H6": Raw("no transports at the puller: hangs", "EngineOptions.channels", ["hangs"]),
}
