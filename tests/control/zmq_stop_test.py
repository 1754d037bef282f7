# SPDX-License-Identifier: Apache-2.0
"""How a manager ends, in good order or not: two managers, real sockets, the in-process engine."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.kv_poll import KVPoll
from kvferry.tests.control.pairs import QUICK, Pair, fails, pair, wait_until

AT_ONCE = 0.5
# Nothing may end by itself here.
_PATIENT = dataclasses.replace(QUICK, orphan_timeout_seconds=30.0, progress_timeout_seconds=30.0)


@pytest.fixture(name="both")
def _both() -> Iterator[Pair]:
    with pair() as made:
        yield made
        wait_until(made.at_baseline, what=str(made.prefill.manager.counters()))


def test_stop_tells_the_peer(both: Pair) -> None:
    sender, receiver = both.ready()
    both.prefill.manager.stop()
    assert sender.poll() is KVPoll.Failed
    assert "shutting down" in fails(receiver, AT_ONCE)
    late = both.prefill.manager.open_sender(99)
    assert late.failure is not None and late.failure.status == 503


def test_stop_of_decode_tells_the_peer(both: Pair) -> None:
    sender, _ = both.ready()
    both.decode.manager.stop()
    assert "shutting down" in fails(sender, AT_ONCE)


def test_a_dead_control_thread_is_seen_and_ends_every_room(both: Pair) -> None:
    sender, receiver = both.ready()

    def broken() -> None:
        raise KeyError("a bug")

    both.decode.manager.loop.post(broken)  # type: ignore[attr-defined]
    assert "control thread died: KeyError('a bug')" in fails(receiver, 1.0)
    assert "a bug" in str(both.decode.manager.failure)
    assert "silent" in fails(sender, 3.0) or "connection" in fails(sender)
    late = both.receiver(77)
    assert late.failure is not None and "a bug" in late.failure.reason
    assert both.prefill.manager.failure is None


class _Interrupting(FakeEngine):
    """Has something happen while a leg is opened: after it was looked whether one may be."""

    interrupt: Callable[[], None] | None = None

    @property
    def failure(self) -> str | None:
        if self.interrupt is not None and threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=self.interrupt)
            self.interrupt = None
            other.start()
            other.join(0.5)  # Unless it has to wait for the leg, it is over then.
        return None


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("end", ["stop", "death of the control thread"])
def test_a_leg_that_is_opened_meanwhile_ends_too(role: str, end: str) -> None:
    network = FakeNetwork()
    engines = tuple(_Interrupting(EngineOptions(), network) for _ in range(2))
    with pair(prefill=_PATIENT, decode=_PATIENT, engines=(engines[0], engines[1])) as both:
        index = ("prefill", "decode").index(role)
        manager: Any = (both.prefill, both.decode)[index].manager

        def die() -> None:
            def broken() -> None:
                raise KeyError("a bug")

            manager.loop.post(broken)
            wait_until(lambda: not manager.loop.alive)

        engines[index].interrupt = manager.stop if end == "stop" else die
        leg = manager.open_sender(1) if role == "prefill" else both.receiver(1)
        assert engines[index].interrupt is None
        assert ("shutting down" if end == "stop" else "a bug") in fails(leg, 2.0)
        wait_until(lambda: manager.counters()["open_rooms"] == 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_stop_ends_the_rest_when_the_control_thread_dies_meanwhile(role: str) -> None:
    before = set(threading.enumerate())
    with pair() as both:
        both.transfer()
        side = both.prefill if role == "prefill" else both.decode
        manager: Any = side.manager

        def broken() -> None:
            raise KeyError("a bug")

        entered, go_on = threading.Event(), threading.Event()

        def busy() -> None:
            entered.set()
            assert go_on.wait(5.0)

        manager.loop.post(busy)
        assert entered.wait(5.0)
        # In the queue before what `stop` asks for, which finds the thread alive.
        manager.loop.post(broken)
        threading.Timer(0.2, go_on.set).start()
        manager.stop()
        assert "a bug" in str(manager.failure)
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_stop_ends_the_rest_when_closing_fails(both: Pair) -> None:
    manager: Any = both.decode.manager
    closed: list[str] = []
    close = both.decode.engine.close

    def noted() -> None:
        closed.append("engine")
        close()

    def broken() -> None:
        manager.close_channel = works
        works()
        raise KeyError("a bug")

    works, manager.close_channel = manager.close_channel, broken
    both.decode.engine.close = noted  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="a bug"):
        manager.stop()
    assert closed == ["engine"] and not manager.loop.alive
    manager.stop()
    assert closed == ["engine"]
