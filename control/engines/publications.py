# SPDX-License-Identifier: Apache-2.0
"""What an engine with a loop thread holds for its peers, from `publish` until `release`.

A publication is prepared on a worker thread (its arrays may still be computing, and copying them
takes time), claimed at most once, and let go of exactly once: when it has ended *and* its
preparation no longer runs.
"""

import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import jax

from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.base import Spec
from kvferry.control.engines.frames import FrameError, tag_of
from kvferry.control.workers import WorkerPool

_SWEEP_SECONDS = 0.2
_MAX_PROBLEM = 2000
_RELEASED = "it was released while it was pulled"
GONE = "nothing is published under this id: it was released, has expired, or never was"
PULLED_BEFORE = "this id was pulled before; ids are for one use"

T = TypeVar("T")
Leaves: TypeAlias = Sequence[jax.Array] | Sequence[Spec]


def check_publishable(key: int, arrays: Sequence[jax.Array]) -> None:
    """Refuses arrays whose bytes this process cannot read.

    Raises:
        ValueError: If one is deleted or has shards elsewhere; names it.
    """
    for index, array in enumerate(arrays):
        if array.is_deleted() or not array.is_fully_addressable:
            state = "deleted or donated" if array.is_deleted() else "not all in this process"
            raise ValueError(f"cannot publish {key}: array {index} is {state}")


def fingerprint(leaves: Leaves) -> bytes:
    """Returns a digest of shapes and dtypes, equal on both ends or the bytes would be misread."""
    text = ";".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def describe(leaves: Leaves) -> str:
    """Names arrays, for people."""
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3])
    return f"{len(leaves)} arrays: {shown}{', ..' if len(leaves) > 3 else ''}"


@dataclasses.dataclass(eq=False)
class Publication(Generic[T]):
    """What is published under one id.

    Attributes:
        key: The id.
        fingerprint: Of its arrays.
        text: Its arrays, for people.
        until: When it expires, in seconds of the monotonic clock.
        prepare: Makes the value; None once it runs or will never run. It refers to the arrays.
        discard: Called once when nothing of it is in use any more, on the loop's thread.
        on_end: Called once when it ends, before `release` returns.
        started: Whether preparing was asked for.
        ready: Whether it was prepared, well or not, or never will be.
        value: What was prepared.
        problem: Why there is no value.
        claimed: Whether its one pull has come.
        answer: Of that pull, while it waits for the value.
        ended: Whether it was released.
        discarded: Whether `discard` was called.
    """

    key: int
    fingerprint: bytes
    text: str
    until: float
    prepare: Callable[[], T] | None
    discard: Callable[[], None]
    on_end: Callable[[], None] | None = None
    started: bool = False
    ready: bool = False
    value: T | None = None
    problem: str = ""
    claimed: bool = False
    answer: "Callable[[Publication[T] | str], None] | None" = None
    ended: bool = False
    discarded: bool = False


class Publications(Generic[T]):
    """All publications of an engine, by the names that they have on the wire.

    Args:
        loop: Answers are given on its thread.
        workers: Threads that prepare.
    """

    def __init__(self, loop: ControlLoop, workers: WorkerPool) -> None:
        self._loop = loop
        self._workers = workers
        self._lock = threading.Lock()
        self._by_tag: dict[bytes, Publication[T]] = {}

    def __len__(self) -> int:
        """Publications that are held."""
        return len(self._by_tag)

    def start(self) -> None:
        """Begins to look for what has expired. Loop thread."""
        self._loop.every(_SWEEP_SECONDS, self._sweep)

    def add(self, publication: Publication[T]) -> None:
        """Holds a publication. Any thread; does not block.

        Raises:
            ValueError: If its id is in use.
        """
        with self._lock:
            tag = tag_of(publication.key)
            if tag in self._by_tag:
                raise ValueError(f"key {publication.key} is published already; ids are for one use")
            self._by_tag[tag] = publication

    def prepare(self, publication: Publication[T]) -> None:
        """Has a publication prepared, if that has not begun. Any thread; does not block."""
        with self._lock:
            if publication.started:
                return
            publication.started = True
        done = functools.partial(self._note_prepared, publication)

        def job() -> None:
            # Nothing but this frame refers to the arrays from here on: a worker keeps its last job.
            prepare, publication.prepare = publication.prepare, None
            assert prepare is not None
            try:
                value, problem = prepare(), ""
            except jax.errors.JaxRuntimeError as error:
                value, problem = None, f"the published arrays failed: {error}"
            except OSError as error:
                value, problem = None, f"no memory to stage in: {error}"
            self._loop.post(functools.partial(done, value, problem[:_MAX_PROBLEM]))

        def on_error(error: BaseException) -> None:
            self._loop.post(functools.partial(done, None, repr(error)[:_MAX_PROBLEM]))

        if not self._workers.submit(job, on_error):
            self._loop.post(functools.partial(done, None, "too many publications wait"))

    def claim(
        self,
        tag: bytes,
        expected: bytes,
        is_proven: Callable[[int], bool],
        answer: Callable[[Publication[T] | str], None],
    ) -> None:
        """Gives a publication to the first pull that asks for it. Loop thread.

        Args:
            tag: Its name on the wire.
            expected: Fingerprint of the arrays that the puller expects.
            is_proven: Given the id, tells whether the puller has proved to know it.
            answer: Called with the prepared publication, or why there is none; now or later, on
                this thread.

        Raises:
            FrameError: If the id is not proved.
        """
        with self._lock:
            publication = self._by_tag.get(tag)
        if publication is None:
            answer(GONE)
            return
        if not is_proven(publication.key):
            raise FrameError("a request that does not prove its id")
        if publication.claimed:
            answer(PULLED_BEFORE)
            return
        publication.claimed = True
        if publication.fingerprint != expected:
            answer(f"published are {publication.text}, which is not what was asked for")
            return
        publication.answer = answer
        if publication.ready:
            self._answer(publication)
        else:
            self.prepare(publication)

    def release(self, key: int) -> None:
        """Ends a publication; unknown ids are ignored. Any thread; does not block."""
        with self._lock:
            publication = self._by_tag.pop(tag_of(key), None)
            if publication is None:
                return
            publication.ended = True
            if not publication.started:
                publication.started, publication.ready = True, True
                publication.prepare, publication.problem = None, _RELEASED
        if publication.on_end is not None:
            publication.on_end()
        self._loop.post(functools.partial(self._finish, publication))

    def release_all(self) -> None:
        """Ends all publications."""
        for publication in self._all():
            self.release(publication.key)

    def _all(self) -> list[Publication[T]]:
        with self._lock:
            return list(self._by_tag.values())

    def _note_prepared(self, publication: Publication[T], value: T | None, problem: str) -> None:
        publication.value, publication.problem, publication.ready = value, problem, True
        if publication.ended:
            self._finish(publication)
        elif publication.answer is not None:
            self._answer(publication)

    def _answer(self, publication: Publication[T]) -> None:
        answer, publication.answer = publication.answer, None
        assert answer is not None
        answer(publication.problem if publication.value is None else publication)

    def _finish(self, publication: Publication[T]) -> None:
        if publication.answer is not None:
            answer, publication.answer = publication.answer, None
            answer(_RELEASED)
        # What is being prepared comes here once more when that is done.
        if publication.ready and not publication.discarded:
            publication.value, publication.discarded = None, True
            publication.discard()

    def _sweep(self) -> None:
        now = time.monotonic()
        for publication in self._all():
            if publication.until <= now:
                self.release(publication.key)
