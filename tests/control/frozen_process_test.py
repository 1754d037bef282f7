# SPDX-License-Identifier: Apache-2.0
"""What a process that stands still, or never moves again, does to the others' books."""

import dataclasses
import time

import zmq

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.control_loop import ControlLoop
from kvferry.control.messages import Register
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.wire import encode
from kvferry.tests.control.pairs import QUICK, fails, pair, wait_until
from kvferry.tests.control.room_registry_test import instance


def test_a_lease_does_not_run_out_while_the_bootstrap_server_itself_is_stopped() -> None:
    """Else a prefill server that runs its own is lost to look-ups just after SIGCONT."""
    ahead_seconds = 0.0
    loop = ControlLoop(clock=lambda: time.monotonic() + ahead_seconds)
    server = ZmqBootstrapServer(
        "127.0.0.1", 0, options=ChannelOptions(peer_timeout_seconds=5.0), loop=loop
    )
    server.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        dealer.send(encode(Register(instance=instance("one"))))
        wait_until(lambda: server.counters()["bootstrap_instances"] == 1)
        ahead_seconds = 100.0  # As it is after a stop.
        for _ in range(2):
            loop.call(lambda: None)  # Each turn of the loop runs the timers that are due.
        assert server.counters()["bootstrap_instances"] == 1
    server.stop()
    loop.stop()


def test_a_prefill_leg_that_comes_after_its_decode_server_died_fails_at_once() -> None:
    patient = dataclasses.replace(QUICK, orphan_timeout_seconds=30.0)
    with pair(prefill=patient) as both:
        both.transfer(1)
        receiver = both.receiver(next(both.rooms))
        receiver.request([1], prompt_tokens=4)
        early = both.prefill.manager.counters
        wait_until(lambda: early()["early_rooms"] == 1)

        def die() -> None:
            raise KeyError("no goodbye")

        both.decode.manager.loop.post(die)  # type: ignore[attr-defined]
        wait_until(lambda: early()["early_rooms"] == 0)
        sender = both.prefill.manager.open_sender(receiver.room)
        assert "closed the connection" in fails(sender, 0.5)


def test_a_prefill_leg_that_comes_after_its_decode_leg_was_given_up_fails_at_once() -> None:
    # Only the prefill server gives up: on a busy machine the decode server might be the first.
    patient = dataclasses.replace(QUICK, orphan_timeout_seconds=30.0)
    with pair(decode=patient) as both:
        receiver = both.receiver(next(both.rooms))
        receiver.request([1], prompt_tokens=4)
        assert "no request for room" in fails(receiver)
        sender = both.prefill.manager.open_sender(receiver.room)
        assert "no request for room" in fails(sender, 0.5)
