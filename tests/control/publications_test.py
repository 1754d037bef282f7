# SPDX-License-Identifier: Apache-2.0
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

from kvferry.control.control_loop import ControlLoop
from kvferry.control.engines.frames import FrameError, tag_of
from kvferry.control.engines.publications import Publication, Publications, describe, fingerprint
from kvferry.control.workers import WorkerPool
from kvferry.tests.control.pairs import wait_until

Answer = Publication[int] | str


class Desk:
    """Publications of numbers, and what became of them."""

    def __init__(self) -> None:
        self.loop = ControlLoop("test")
        self.workers = WorkerPool("test", 1, 10)
        self.held: Publications[int] = Publications(self.loop, self.workers)
        self.answers: list[Answer] = []
        self.ended: list[str] = []
        self.go_on = threading.Event()
        self.loop.start()
        self.loop.call(self.held.start)
        self.workers.start()

    def add(
        self, key: int, *, prepare: Callable[[], int] | None = None, seconds: float = 30.0
    ) -> Publication[int]:
        made = Publication(
            key=key,
            fingerprint=b"f",
            text="one number",
            until=time.monotonic() + seconds,
            prepare=prepare or (lambda: 42),
            discard=lambda: self.ended.append(f"discard {key}"),
            on_end=lambda: self.ended.append(f"end {key}"),
        )
        self.held.add(made)
        return made

    def slow(self) -> int:
        self.go_on.wait(10.0)
        return 42

    def claim(self, key: int, *, expected: bytes = b"f", proven: bool = True) -> None:
        self.loop.call(
            lambda: self.held.claim(
                tag_of(key), expected, lambda known: proven and known == key, self.answers.append
            )
        )

    def answer(self) -> Answer:
        wait_until(lambda: self.answers)
        return self.answers.pop()

    def settle(self) -> list[str]:
        """Returns what has ended, once all that was posted is done."""
        self.loop.call(lambda: None)
        return self.ended


@pytest.fixture(name="desk")
def _desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.go_on.set()
    desk.workers.stop()
    desk.loop.stop()


def test_it_is_prepared_when_asked_for_and_given_once(desk: Desk) -> None:
    made = desk.add(1)
    assert made.prepare is not None and len(desk.held) == 1
    desk.claim(1)
    assert desk.answer() is made and made.value == 42 and made.prepare is None
    desk.claim(1)
    assert desk.answer() == "this id was pulled before; ids are for one use"
    desk.held.release(1)
    assert desk.settle() == ["end 1", "discard 1"] and made.value is None
    desk.claim(1)
    assert "nothing is published under this id" in str(desk.answer())


def test_it_may_be_prepared_before(desk: Desk) -> None:
    made = desk.add(1)
    desk.held.prepare(made)
    desk.held.prepare(made)
    wait_until(lambda: made.ready)
    desk.claim(1)
    assert desk.answer() is made


def test_a_release_waits_for_preparing_to_end_and_tells_the_puller_at_once(desk: Desk) -> None:
    desk.add(1, prepare=desk.slow)
    desk.claim(1)
    desk.held.release(1)
    assert desk.answer() == "it was released while it was pulled"
    assert desk.settle() == ["end 1"]
    desk.go_on.set()
    wait_until(lambda: desk.ended == ["end 1", "discard 1"])
    assert desk.settle() == ["end 1", "discard 1"] and not desk.answers


def test_what_was_never_prepared_is_let_go_of(desk: Desk) -> None:
    made = desk.add(1)
    desk.held.release(1)
    desk.held.release(1)
    assert desk.settle() == ["end 1", "discard 1"] and made.prepare is None
    desk.held.prepare(made)  # Too late: nothing happens.
    assert desk.settle() == ["end 1", "discard 1"]


def test_a_claim_that_meets_a_release_gets_a_reason(desk: Desk) -> None:
    made = desk.add(1)

    def release_now(key: int) -> bool:
        desk.held.release(key)
        return True

    desk.loop.call(lambda: desk.held.claim(tag_of(1), b"f", release_now, desk.answers.append))
    assert desk.answer() == "it was released while it was pulled"
    assert desk.settle() == ["end 1", "discard 1"] and made.value is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (jax.errors.JaxRuntimeError("device lost"), "the published arrays failed: device lost"),
        (OSError("no pages"), "no memory to stage in: no pages"),
        (RuntimeError("a bug"), "a bug"),
    ],
)
def test_what_cannot_be_prepared_is_told(desk: Desk, error: Exception, told: str) -> None:
    def fail() -> int:
        raise error

    desk.add(1, prepare=fail)
    desk.claim(1)
    assert told in str(desk.answer())
    desk.held.release(1)
    assert desk.settle() == ["end 1", "discard 1"]


def test_it_expires(desk: Desk) -> None:
    desk.add(1, seconds=0.1)
    desk.add(2)
    wait_until(lambda: len(desk.held) == 1, 3.0)
    assert desk.settle() == ["end 1", "discard 1"]
    desk.held.release_all()
    assert len(desk.held) == 0


def test_only_who_proves_the_id_and_wants_these_arrays(desk: Desk) -> None:
    desk.add(1)
    with pytest.raises(FrameError, match="does not prove its id"):
        desk.claim(1, proven=False)
    desk.claim(1, expected=b"g")
    assert desk.answer() == "published are one number, which is not what was asked for"
    with pytest.raises(ValueError, match="key 1 is published already"):
        desk.add(1)


def test_arrays_are_told_apart() -> None:
    arrays = [jnp.zeros((2, 3)), jnp.zeros((4,), jnp.int8)]
    assert describe(arrays) == "2 arrays: float32[2, 3], int8[4]"
    assert describe(arrays * 2).endswith(", ..")
    others = [arrays, arrays[:1], arrays[::-1], [arrays[0].T, arrays[1]]]
    assert len({fingerprint(each) for each in others}) == 4
    assert fingerprint(arrays) == fingerprint(
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
    )
