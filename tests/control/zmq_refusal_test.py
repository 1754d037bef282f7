# SPDX-License-Identifier: Apache-2.0
"""A decode server that cannot take a room itself tells prefill, which need not wait for it."""

import dataclasses

import pytest

from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.tests.control.pairs import QUICK, fails, pair, wait_until

# Nothing may end by itself here.
_PATIENT = dataclasses.replace(QUICK, orphan_timeout_seconds=30.0, progress_timeout_seconds=30.0)


class _MayFail(FakeEngine):
    """Can be told that it has failed."""

    reason: str | None = None

    @property
    def failure(self) -> str | None:
        return self.reason


@pytest.mark.parametrize("met", [True, False])
def test_a_decode_server_with_a_fault_tells_prefill(met: bool) -> None:
    """Its own engine cannot receive: P must not wait for a room that nobody will ask for."""
    network = FakeNetwork()
    engines = FakeEngine(EngineOptions(), network), _MayFail(EngineOptions(), network)
    with pair(prefill=_PATIENT, decode=_PATIENT, engines=engines) as both:
        if met:
            both.transfer()
        wait_until(lambda: both.bootstrap.settled)
        engines[1].reason = "no buffers are left"
        sender = both.prefill.manager.open_sender(next(both.rooms))
        receiver = both.receiver(sender.room)
        assert "no buffers are left" in fails(receiver, 0.0)
        assert "decode server: transfer engine 'fake': no buffers are left" in fails(sender, 1.0)
        # Whichever comes first.
        receiver = both.receiver(next(both.rooms))
        wait_until(lambda: both.prefill.manager.counters()["tombstones"] == 2)
        assert "no buffers are left" in fails(both.prefill.manager.open_sender(receiver.room), 0.0)
        wait_until(both.at_baseline)


def test_a_decode_server_with_too_many_rooms_tells_prefill() -> None:
    with pair(prefill=_PATIENT, decode=dataclasses.replace(_PATIENT, max_rooms=1)) as both:
        sender, _ = both.ready(1)
        refused = both.prefill.manager.open_sender(next(both.rooms))
        receiver = both.receiver(refused.room)
        assert "1 rooms are open, which is the limit" in fails(receiver, 0.0)
        assert "1 rooms are open, which is the limit" in fails(refused, 1.0)
        sender.abort("done")


def test_prefill_servers_are_told_when_their_bootstrap_server_is_gone() -> None:
    """The look-up fails at once, but those that it led to before are still connected."""
    with pair(prefill=_PATIENT, decode=_PATIENT) as both:
        both.transfer()
        both.bootstrap.stop()
        sender = both.prefill.manager.open_sender(next(both.rooms))
        receiver = both.receiver(sender.room)
        assert "bootstrap server" in fails(receiver, 1.5)
        assert "bootstrap server" in fails(sender, 1.0)
        wait_until(both.at_baseline)
