# SPDX-License-Identifier: Apache-2.0
"""Threads for waits that may never end."""

import threading
from collections.abc import Iterator

import pytest

from kvferry.control.engines.spare_threads import SpareThreads
from kvferry.tests.control.pairs import wait_until

NAME = "spare-test"


@pytest.fixture(name="spare")
def _spare() -> Iterator[SpareThreads]:
    made = SpareThreads(NAME)
    yield made
    made.close(5.0)
    assert running() == 0


def running() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def test_each_job_runs_at_once_whatever_the_others_wait_for(spare: SpareThreads) -> None:
    never, done = threading.Event(), threading.Event()
    for _ in range(40):
        spare.run(lambda: _wait(never))
    spare.run(done.set)
    assert done.wait(5.0)
    assert running() >= 40
    never.set()


def test_an_idle_thread_takes_the_next_job(spare: SpareThreads) -> None:
    for _ in range(20):
        done = threading.Event()
        spare.run(done.set)
        assert done.wait(5.0)
        wait_until(lambda: spare._num_idle == 1)
    assert running() == 1


def test_a_job_that_raises_costs_nobody_else_anything(spare: SpareThreads) -> None:
    def bug() -> None:
        raise KeyError("a bug")

    spare.run(bug)
    done = threading.Event()
    spare.run(done.set)
    assert done.wait(5.0)


def test_an_idle_thread_keeps_nothing_of_its_last_job(spare: SpareThreads) -> None:
    class Big:
        gone = False

        def __call__(self) -> None: ...

        def __del__(self) -> None:
            Big.gone = True

    spare.run(Big())
    wait_until(lambda: Big.gone)


def test_closing_waits_for_a_bounded_time() -> None:
    never = threading.Event()
    spare = SpareThreads(NAME)
    spare.run(lambda: _wait(never))
    spare.close(0.1)
    assert running() == 1
    never.set()
    wait_until(lambda: running() == 0)


def _wait(event: threading.Event) -> None:
    event.wait(30.0)
