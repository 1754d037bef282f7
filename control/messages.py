# SPDX-License-Identifier: Apache-2.0
"""Every message that travels between processes; `wire.py` turns them into bytes and back.

Fields are named on the wire, so a later version may add fields with defaults: an older peer skips
them. Every number, string and list is bounded by its type, so a decoded message is within limits or
does not exist.

Who sends what (D: decode server, P: prefill server, B: bootstrap server):

* P to B: Register, Heartbeat, Withdraw, Announce, Retract. B to P: Registered, HeartbeatAck.
* D to B: Lookup. B to D: LookupReply.
* D to P: Hello, CanaryDone, KVOpen, KVRequest, KVChunkDone, KVAbort, Touched.
* P to D: Welcome, HelloWanted, KVAccept, KVChunk, KVFailed, Touched.
* Whoever has connected: Ping, to stay connected. Anyone: Pong, in answer; Refused.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvferry.control.ids import ID_BITS
from kvferry.control.kv_layout import KVLayout

# The longest time that one process may tell another.
MAX_SECONDS = 3600

Room = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << ID_BITS)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=1 << ID_BITS)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
HttpStatus = Annotated[int, msgspec.Meta(ge=400, le=599)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Rooms = Annotated[list[Room], msgspec.Meta(max_length=65536)]
Ids = Annotated[list[Id], msgspec.Meta(max_length=65536)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]

REASON_LIMIT = 4096


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="t"):
    """Base of all messages; the tag on the wire is the class name."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer engine of a process.

    Attributes:
        name: Registered name, for example "jax".
        address: Where its peers pull from.
        settings: What must be equal on both ends.
        versions: Versions of what it is built on; told, not compared.
    """

    name: Name
    address: Name
    settings: dict[Name, int | str] = {}
    versions: dict[Name, Name] = {}


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one server process, as its peers see it.

    Attributes:
        instance_id: Unguessable and new at every start.
        generation: Grows from one start to the next.
        role: Which half it serves.
        host: Numeric address that peers connect to, never a wildcard.
        side_channel_port: Port of its side channel; 0 for a decode server, which has none.
        layout: Its KV cache.
        engine: Its transfer engine.
    """

    instance_id: Name
    generation: Generation
    role: Literal["prefill", "decode"]
    host: Name
    side_channel_port: Port
    layout: KVLayout
    engine: EngineInfo


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of one published array."""

    shape: Shape
    dtype: Name


class KVMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the decode server needs besides the pages; travels with the last chunk.

    Attributes:
        first_token: The token that prefill sampled.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Prompt tokens that the prefill server's own cache held.
        first_token_logprob: Its log-probability, if asked for.
        top_logprobs: Most likely first tokens as (log-probability, token id), if asked for.
        extra: Room for what later versions hand over. Values are plain data (numbers, strings,
            bytes, lists, dictionaries).
    """

    first_token: Count
    prompt_tokens: Count
    cached_tokens: Count = 0
    first_token_logprob: float | None = None
    top_logprobs: Annotated[list[tuple[float, Count]], msgspec.Meta(max_length=1024)] = []
    extra: dict[Name, Any] = {}


class Ping(_Message, frozen=True):
    """Asks for a sign of life, and is one."""


class Pong(_Message, frozen=True):
    """Answers `Ping`; the sender gives up who is silent for longer than `timeout_seconds`."""

    timeout_seconds: Seconds


class Refused(_Message, frozen=True):
    """The sender will not talk to the receiver, and says why."""

    reason: Reason
    status: HttpStatus = 503


class Register(_Message, frozen=True):
    """P tells B that it is there; repeated registration is harmless."""

    instance: Instance


class Registered(_Message, frozen=True):
    """B holds the registration for `lease_seconds` after each heartbeat."""

    lease_seconds: Seconds


class Heartbeat(_Message, frozen=True):
    """P renews its lease."""

    instance_id: Name
    generation: Generation


class HeartbeatAck(_Message, frozen=True):
    """B answers a heartbeat; `known` false means: register again."""

    known: bool


class Withdraw(_Message, frozen=True):
    """P ends its registration."""

    instance_id: Name
    generation: Generation


class Announce(_Message, frozen=True):
    """P holds these rooms."""

    instance_id: Name
    rooms: Rooms


class Retract(_Message, frozen=True):
    """P no longer holds these rooms."""

    instance_id: Name
    rooms: Rooms


class Lookup(_Message, frozen=True):
    """D asks which P holds a room.

    Attributes:
        query: Chosen by D, repeated in the reply.
        room: The room.
        instance_id: Asks for this instance instead of the one that announced the room.
    """

    query: Id
    room: Room
    instance_id: Name | None = None


class LookupReply(_Message, frozen=True):
    """The instance asked for, or the reason why there is none."""

    query: Id
    instance: Instance | None = None
    reason: Reason = ""


class Hello(_Message, frozen=True):
    """D's first message on a connection: who it is and what its pages look like."""

    instance: Instance


class Welcome(_Message, frozen=True):
    """P accepts D's layout and engine.

    Attributes:
        instance: P itself.
        canary_key: Id of published test arrays; D pulls and compares them before it trusts the
            data path.
    """

    instance: Instance
    canary_key: Id


class CanaryDone(_Message, frozen=True):
    """D has compared the test arrays; P may let go of them."""

    canary_key: Id


class HelloWanted(_Message, frozen=True):
    """P does not know the connection (it has restarted, or gave the peer up): start again."""


class KVOpen(_Message, frozen=True):
    """D holds the decode leg of a room, and may still wait for pages of its own.

    Attributes:
        room: The room.
        transfer_id: D's one-shot id of this attempt.
        generation: Generation of the P that D means, so that no other one answers.
    """

    room: Room
    transfer_id: Id
    generation: Generation


class KVRequest(_Message, frozen=True):
    """D has reserved pages: the credit on which P works.

    Attributes:
        room: The room.
        transfer_id: As in `KVOpen`.
        first_page: Index in the prompt of the first page wanted; earlier ones are in D's cache.
        num_pages: Pages wanted.
        prompt_tokens: Tokens of the prompt as D counts them; P compares.
        extra: Further values that P's scheduler compares or uses (limits, digests).
    """

    room: Room
    transfer_id: Id
    first_page: Count
    num_pages: Count
    prompt_tokens: Count
    extra: dict[Name, int | float | str | bool] = {}


class KVAccept(_Message, frozen=True):
    """P holds the prefill leg of the room too: the two have met."""

    transfer_id: Id


class KVChunk(_Message, frozen=True):
    """A run of pages is published and may be pulled.

    Attributes:
        transfer_id: The transfer it belongs to.
        sequence: 0 for the first chunk of a transfer, then counting up.
        key: Engine id of the arrays; not used when `num_pages` is 0.
        first_page: Index in the prompt of its first page.
        num_pages: Pages in it, without the padding of the arrays.
        leaves: The arrays as published, from which D builds what it pulls into.
        last: Whether this is the last chunk.
        metadata: With the last chunk.
    """

    transfer_id: Id
    sequence: Count
    key: Id
    first_page: Count
    num_pages: Count
    leaves: Annotated[list[Leaf], msgspec.Meta(max_length=65536)] = []
    last: bool = False
    metadata: KVMetadata | None = None


class KVChunkDone(_Message, frozen=True):
    """D has put the chunk into its pages; P may let go of it."""

    transfer_id: Id
    room: Room
    sequence: Count


class KVFailed(_Message, frozen=True):
    """P's leg has failed; D's attempt `transfer_id` is over."""

    transfer_id: Id
    reason: Reason
    status: HttpStatus


class KVAbort(_Message, frozen=True):
    """D's leg has failed or was never started; P's leg of the room is over."""

    room: Room
    transfer_id: Id
    reason: Reason
    status: HttpStatus


class Touched(_Message, frozen=True):
    """The sender's legs of these transfers made progress since its last such message."""

    transfer_ids: Ids


Message: TypeAlias = (
    Ping
    | Pong
    | Refused
    | Register
    | Registered
    | Heartbeat
    | HeartbeatAck
    | Withdraw
    | Announce
    | Retract
    | Lookup
    | LookupReply
    | Hello
    | Welcome
    | CanaryDone
    | HelloWanted
    | KVOpen
    | KVRequest
    | KVAccept
    | KVChunk
    | KVChunkDone
    | KVFailed
    | KVAbort
    | Touched
)


def clip_reason(reason: str) -> str:
    """Returns `reason` as a message may carry it: valid Unicode, not too long."""
    reason = reason.encode("utf-8", "replace").decode("utf-8")
    return reason if len(reason) <= REASON_LIMIT else reason[: REASON_LIMIT - 3] + "..."
