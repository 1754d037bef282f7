# SPDX-License-Identifier: Apache-2.0
import functools
import threading
import time
import weakref

import pytest

from kvferry.control.workers import WorkerPool
from kvferry.tests.control.pairs import wait_until


def _wait(event: threading.Event) -> None:
    event.wait(5.0)


def unexpected(error: BaseException) -> None:
    raise AssertionError(f"not expected: {error!r}")


def test_jobs_run_on_named_threads() -> None:
    pool = WorkerPool("work", 3, 100)
    pool.start()
    names: list[str] = []
    for _ in range(50):
        assert pool.submit(lambda: names.append(threading.current_thread().name), unexpected)
    wait_until(lambda: pool.pending == 0)
    assert len(names) == 50 and set(names) <= {"work-0", "work-1", "work-2"}
    pool.stop()
    pool.stop()
    assert not pool.submit(lambda: None, unexpected)


def test_a_failing_job_is_reported_and_the_thread_goes_on() -> None:
    pool = WorkerPool("work", 1, 10)
    pool.start()
    errors: list[BaseException] = []
    results: list[int] = []

    def fail() -> None:
        raise KeyError("bug")

    pool.submit(fail, errors.append)
    pool.submit(lambda: results.append(1), unexpected)
    wait_until(lambda: pool.pending == 0)
    assert isinstance(errors[0], KeyError) and results == [1]
    pool.stop()


def test_the_queue_is_bounded() -> None:
    pool = WorkerPool("work", 1, 2)
    pool.start()
    gate = threading.Event()
    assert pool.submit(lambda: _wait(gate), unexpected)
    taken = [pool.submit(lambda: None, unexpected) for _ in range(10)]
    assert taken.count(True) in (2, 3) and not taken[-1]
    gate.set()
    wait_until(lambda: pool.pending == 0)
    pool.stop()


def test_stop_drops_what_waits() -> None:
    pool = WorkerPool("work", 1, 10)
    pool.start()
    gate = threading.Event()
    ran: list[int] = []
    pool.submit(lambda: _wait(gate), unexpected)
    for number in range(5):
        pool.submit(functools.partial(ran.append, number), unexpected)
    threading.Timer(0.1, gate.set).start()
    start = time.monotonic()
    pool.stop()
    assert time.monotonic() - start < 2.0
    assert ran in ([], [0]) and pool.pending == 0


def test_it_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one thread, got 0"):
        WorkerPool("none", 0, 1)


def test_an_idle_thread_holds_nothing_of_its_last_job() -> None:
    pool = WorkerPool("test", 1, 4)
    pool.start()

    class Large:
        """Stands for an array."""

    large = Large()
    alive = weakref.ref(large)
    pool.submit(functools.partial(print, large), functools.partial(print, large))
    del large
    wait_until(lambda: alive() is None)
    pool.stop()
