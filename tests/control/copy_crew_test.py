# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Iterator

import pytest

from kvferry.control.engines.copy_crew import CopyCrew


@pytest.fixture(name="crew", params=[0, 1, 3])
def _crew(request: pytest.FixtureRequest) -> Iterator[CopyCrew]:
    crew = CopyCrew(request.param)
    crew.start()
    yield crew
    crew.stop()
    crew.stop()


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_copy_is_made_once(crew: CopyCrew, count: int) -> None:
    made: list[int] = []
    crew.run([lambda number=number: made.append(number) for number in range(count)])  # type: ignore[misc]
    assert sorted(made) == list(range(count))


def test_helpers_help() -> None:
    crew, meeting = CopyCrew(2), threading.Barrier(3)
    crew.start()

    def meet() -> None:
        meeting.wait(10.0)

    crew.run([meet] * 3)
    crew.stop()


def test_helpers_that_are_busy_are_not_waited_for() -> None:
    crew, go_on, started = CopyCrew(1), threading.Event(), threading.Event()
    crew.start()

    def slow() -> None:
        started.set()
        go_on.wait(10.0)

    other = threading.Thread(target=crew.run, args=([slow, slow],))
    other.start()
    assert started.wait(10.0)
    made: list[int] = []
    crew.run([lambda: made.append(1)] * 10)
    assert len(made) == 10 and not go_on.is_set()
    go_on.set()
    other.join()
    crew.stop()


def test_a_copy_that_fails_is_told_when_nobody_writes_any_more(crew: CopyCrew) -> None:
    running: set[int] = set()

    def copy(number: int) -> None:
        running.add(number)
        try:
            if number == 5:
                raise OSError("no such memory")
        finally:
            running.discard(number)

    with pytest.raises(OSError, match=r"no such memory|of 50 copies were made"):
        crew.run([lambda number=number: copy(number) for number in range(50)])  # type: ignore[misc]
    assert not running
