# SPDX-License-Identifier: Apache-2.0
"""Managers with keys, and what is said at start-up about the ports that keys do not protect."""

import dataclasses

import pytest

from kvferry.control.connection import KVManager
from kvferry.control.engines.base import EngineOptions, TransferEngine
from kvferry.control.engines.fake_engine import FakeEngine
from kvferry.control.engines.jax_engine import JaxEngine
from kvferry.control.engines.tcp_engine import TcpEngine
from kvferry.control.keys import make_keys
from kvferry.control.zmq_connection import create_manager
from kvferry.tests.control.pairs import LAYOUT, QUICK, Events, Pool, fails, pair, wait_until


def test_a_pair_with_the_same_keys_hands_over() -> None:
    options = dataclasses.replace(QUICK, keys=make_keys())
    with pair(prefill=options, decode=options) as both:
        both.transfer()
        wait_until(both.at_baseline)


@pytest.mark.parametrize("keyed", ["prefill", "decode", "both"])
def test_other_keys_end_the_request_with_a_reason(keyed: str) -> None:
    prefill, decode = (
        dataclasses.replace(QUICK, keys=make_keys() if keyed in (role, "both") else None)
        for role in ("prefill", "decode")
    )
    with pair(prefill=prefill, decode=decode) as both:
        reason = fails(both.receiver(1))
        assert "bootstrap server 127.0.0.1:" in reason and "--curve_key_file" in reason
        assert both.decode.manager.failure is None and both.prefill.manager.failure is None


def _manager(host: str, exposure: str) -> KVManager:
    engine = FakeEngine(EngineOptions())
    engine.exposure = exposure
    # A decode manager listens nowhere, so any address will do.
    options = dataclasses.replace(QUICK, host=host, keys=make_keys())
    return create_manager(
        "decode", options=options, layout=LAYOUT, pages=Pool(), engine=engine, on_event=Events()
    )


@pytest.mark.parametrize("engine", [JaxEngine, TcpEngine, TransferEngine])
def test_ports_that_keys_do_not_protect_are_told_when_they_leave_loopback(
    engine: type[TransferEngine], caplog: pytest.LogCaptureFixture
) -> None:
    manager = _manager("192.0.2.7", engine.exposure)
    manager.start()
    manager.stop()
    told = [each.getMessage() for each in caplog.records if "192.0.2.7" in each.getMessage()]
    assert len(told) == 1 and engine.exposure in told[0] and "keys do not protect" in told[0]


@pytest.mark.parametrize(
    ("host", "exposure"),
    [("127.0.0.1", JaxEngine.exposure), ("::1", TcpEngine.exposure), ("192.0.2.7", "")],
)
def test_nothing_is_told_where_nothing_is_exposed(
    host: str, exposure: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = _manager(host, exposure)
    manager.start()
    manager.stop()
    assert "do not protect" not in caplog.text


def test_what_the_engines_say_about_themselves() -> None:
    assert "neither authenticate nor encrypt" in JaxEngine.exposure
    assert "unencrypted" in TcpEngine.exposure
    assert FakeEngine.exposure == ""
