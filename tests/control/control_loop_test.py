# SPDX-License-Identifier: Apache-2.0
import functools
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.control.control_loop import ControlLoop, ControlLoopError
from kvferry.tests.control.pairs import wait_until


def _wait(event: threading.Event) -> None:
    event.wait(5.0)


def _raise() -> None:
    raise KeyError("a bug")


@pytest.fixture(name="loop")
def _loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-loop")
    loop.start()
    yield loop
    loop.stop()


def test_posted_actions_run_in_order_on_its_thread(loop: ControlLoop) -> None:
    seen: list[tuple[int, str]] = []
    done = threading.Event()

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    for number in range(100):
        loop.post(functools.partial(note, number))
    loop.post(done.set)
    assert done.wait(2.0)
    assert seen == [(number, "test-loop") for number in range(100)]


def test_call_returns_or_raises(loop: ControlLoop) -> None:
    assert loop.call(lambda: 41 + 1) == 42
    assert loop.call(lambda: loop.call(lambda: "nested")) == "nested"

    def fail() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        loop.call(fail)
    assert loop.alive and loop.failure is None
    release = threading.Event()
    loop.post(lambda: _wait(release))
    with pytest.raises(TimeoutError, match=r"did not answer in 0\.05 s"):
        loop.call(lambda: None, timeout_seconds=0.05)
    release.set()


def test_timers(loop: ControlLoop) -> None:
    ticks: list[float] = []
    once: list[float] = []
    timer = loop.call(lambda: loop.every(0.02, lambda: ticks.append(time.monotonic())))
    loop.call(lambda: loop.call_later(0.05, lambda: once.append(time.monotonic())))
    wait_until(lambda: len(ticks) >= 4 and once)
    loop.call(timer.cancel)
    count = len(ticks)
    time.sleep(0.1)
    assert len(ticks) == count and len(once) == 1


def test_it_wakes_at_once(loop: ControlLoop) -> None:
    time.sleep(0.05)  # It sleeps now, for up to a second.
    waits = []
    for _ in range(20):
        start = time.monotonic()
        loop.call(lambda: None)
        waits.append(time.monotonic() - start)
    assert sorted(waits)[10] < 0.02


def test_an_exception_ends_it_and_is_kept() -> None:
    loop = ControlLoop("dying")
    told: list[str] = []
    loop.on_failure(lambda: told.append("told"))
    loop.start()

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    assert loop.post(fail)
    wait_until(lambda: not loop.alive)
    assert isinstance(loop.failure, ZeroDivisionError) and told == ["told"]
    assert not loop.post(lambda: None)
    with pytest.raises(ControlLoopError, match="has ended"):
        loop.call(lambda: None)
    with pytest.raises(ControlLoopError, match="has ended"):
        loop.start()
    loop.stop()


def test_start_and_stop_are_idempotent() -> None:
    loop = ControlLoop("twice")
    with pytest.raises(ControlLoopError, match="not started"):
        _ = loop.context
    loop.start()
    loop.start()
    loop.stop()
    loop.stop()
    assert not loop.alive
    never = ControlLoop("never")
    never.stop()
    assert not never.post(lambda: None)


def test_work_posted_before_stop_is_done() -> None:
    loop = ControlLoop("ending")
    loop.start()
    seen: list[int] = []
    for number in range(50):
        loop.post(functools.partial(seen.append, number))
    loop.stop()
    assert seen == list(range(50))


def test_a_busy_loop_is_reported() -> None:
    loop = ControlLoop("busy")
    loop.start()
    release = threading.Event()
    loop.post(lambda: _wait(release))
    with pytest.raises(TimeoutError, match="busy did not end"):
        loop.stop(timeout_seconds=0.05)
    release.set()
    loop.stop()


def test_a_call_ends_when_the_loop_dies_before_it() -> None:
    loop = ControlLoop("dying")
    loop.start()
    release = threading.Event()
    loop.post(lambda: _wait(release))
    loop.post(_raise)
    threading.Timer(0.1, release.set).start()
    started = time.monotonic()
    with pytest.raises(ControlLoopError, match="dying has ended"):
        loop.call(lambda: None)
    assert time.monotonic() - started < 5.0


def test_the_awake_clock_stands_still_while_the_process_does() -> None:
    now = [0.0]
    loop = ControlLoop("frozen", clock=lambda: now[0])
    loop.start()
    loop.call(lambda: None)
    before = loop.awake_seconds
    now[0] += 3600.0  # As if the process had been stopped for an hour.
    loop.call(lambda: None)
    assert loop.awake_seconds - before < 5.0
    loop.stop()
