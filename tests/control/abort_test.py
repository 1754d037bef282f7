# SPDX-License-Identifier: Apache-2.0
"""A request is given up by either side, both, or a shutdown, in each state: nothing is left over.

The states a request can be in, as far as its two legs can tell, times everybody who may end it. The
end is the same each time: both legs fail within a second with the reason, and what was held is
released exactly once. All states with one engine; those in which an engine holds something with
each of them.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import pytest

from kvferry.control.connection import KVPages, KVReceiver, KVSender
from kvferry.control.kv_poll import KVPoll
from kvferry.tests.control.pairs import (
    QUICK,
    Pair,
    Side,
    fails,
    is_baseline,
    metadata,
    pair,
    reaches,
    wait_until,
)

AT_ONCE = 1.0
# Nothing may end by itself here.
_PATIENT = dataclasses.replace(
    QUICK, orphan_timeout_seconds=30.0, progress_timeout_seconds=30.0, pull_timeout_seconds=30.0
)

Legs = tuple[KVSender | None, KVReceiver | None]


class _SlowPages:
    """A pool whose gathered pages, while `slow` is set, are computed for a while yet.

    A pull of them is in progress for as long, whatever the engine.
    """

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages
        self.slow = False
        self.scatter, self.specs = pages.scatter, pages.specs

    def gather(self, page_ids: Sequence[int]) -> list[jax.Array]:
        arrays = self._pages.gather(page_ids)
        if not self.slow:
            return arrays
        # On another device than the pulled arrays', which must not wait for it too.
        return list(_after_long_work(jax.device_put(arrays, jax.devices()[-1])))


@jax.jit
def _after_long_work(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays as they are, about half a second later."""
    ones = jnp.ones(1000)
    zero = jax.lax.fori_loop(0, 300_000, lambda _, each: jnp.sin(each) * 0.9, ones)[0] < 0
    return [array + zero.astype(array.dtype) for array in arrays]


def _slow_pages(both: Pair) -> _SlowPages:
    pages = getattr(both.prefill.manager, "pages", None)
    assert isinstance(pages, _SlowPages)
    return pages


def _prefill_only(both: Pair) -> Legs:
    return both.prefill.manager.open_sender(next(both.rooms)), None


def _decode_only(both: Pair) -> Legs:
    receiver = both.receiver(next(both.rooms))
    receiver.request(both.reserved(2), prompt_tokens=8)
    wait_until(lambda: both.prefill.manager.counters()["early_rooms"] == 1)
    return None, receiver


def _met(both: Pair) -> Legs:
    sender, receiver = both.open(request=False)
    wait_until(lambda: getattr(sender, "leg", None) is not None)
    return sender, receiver


def _waiting(both: Pair) -> Legs:
    return both.ready()


def _pulling(both: Pair) -> Legs:
    sender, receiver = both.ready()
    _slow_pages(both).slow = True
    assert sender.send([0, 1], last=False)
    reaches(receiver, KVPoll.Transferring)
    assert both.decode.manager.counters()["pending_pulls"] == 1
    return sender, receiver


def _partly_committed(both: Pair) -> Legs:
    sender, receiver = both.ready()
    assert sender.send([0, 1], last=False)
    wait_until(receiver.commit)
    wait_until(lambda: both.prefill.manager.counters()["published_chunks"] == 0)
    return sender, receiver


def _arrived(both: Pair) -> Legs:
    sender, receiver = both.ready()
    assert sender.send([0, 1, 2, 3, 4], last=True, metadata=metadata())
    reaches(receiver, KVPoll.Transferring)
    wait_until(lambda: both.decode.manager.counters()["pending_pulls"] == 0)
    return sender, receiver


_STATES: dict[str, Callable[[Pair], Legs]] = {
    "only the prefill leg is there": _prefill_only,
    "only the decode leg is there": _decode_only,
    "met, nothing reserved": _met,
    "waiting for the prompt": _waiting,
    "pulling": _pulling,
    "a part is committed": _partly_committed,
    "all has arrived": _arrived,
}


def _by_prefill(both: Pair, sender: KVSender | None, receiver: KVReceiver | None) -> None:
    assert sender is not None
    sender.abort("given up", 400)


def _by_decode(both: Pair, sender: KVSender | None, receiver: KVReceiver | None) -> None:
    assert receiver is not None
    receiver.abort("given up", 400)


def _by_both(both: Pair, sender: KVSender | None, receiver: KVReceiver | None) -> None:
    """A router that has waited too long closes both requests."""
    for leg in (sender, receiver):
        if leg is not None:
            leg.abort("given up", 400)


def _prefill_ends(both: Pair, sender: KVSender | None, receiver: KVReceiver | None) -> None:
    both.prefill.manager.stop()


def _decode_ends(both: Pair, sender: KVSender | None, receiver: KVReceiver | None) -> None:
    both.decode.manager.stop()


# In which an engine holds something.
_ENGINE_AT_WORK = ("pulling", "a part is committed", "all has arrived")
_ENDS: dict[str, Callable[[Pair, KVSender | None, KVReceiver | None], None]] = {
    "prefill aborts": _by_prefill,
    "decode aborts": _by_decode,
    "both abort": _by_both,
    "prefill shuts down": _prefill_ends,
    "decode shuts down": _decode_ends,
}
# Whoever has no leg has nothing to abort, and a server nobody has heard of tells nobody.
_IMPOSSIBLE = {
    ("only the prefill leg is there", "decode aborts"),
    ("only the prefill leg is there", "decode shuts down"),
    ("only the decode leg is there", "prefill aborts"),
}


class _Ledger:
    """Counts what the prefill server's engine published and let go of."""

    def __init__(self, both: Pair) -> None:
        self.balance: collections.Counter[int] = collections.Counter()
        engine = both.prefill.engine
        publish, release = engine.publish, engine.release

        def counted_publish(key: int, *values: object) -> None:
            self.balance[key] += 1
            publish(key, *values)  # type: ignore[arg-type]

        def counted_release(key: int, *, delivered: bool) -> None:
            if key in self.balance:
                self.balance[key] -= 1
            release(key, delivered=delivered)

        engine.publish = counted_publish  # type: ignore[method-assign, assignment]
        engine.release = counted_release  # type: ignore[method-assign]


def _cases() -> Iterator[tuple[str, str, str]]:
    for engine in ("tcp", "shm", "zmq", "jax"):
        for state in _STATES if engine == "tcp" else _ENGINE_AT_WORK:
            for end in _ENDS:
                if (state, end) not in _IMPOSSIBLE:
                    yield engine, state, end


@pytest.mark.parametrize(("engine", "state", "end"), list(_cases()))
def test_both_legs_end_at_once_and_hold_nothing(engine: str, state: str, end: str) -> None:
    with pair(engine, prefill=_PATIENT, decode=_PATIENT, wrap=_SlowPages) as both:
        both.transfer(1)  # Now the two know each other.
        wait_until(both.at_baseline)
        ledger = _Ledger(both)
        before = [side.manager.counters()["transfers_failed"] for side in _sides(both)]
        written = both.decode.pool.layers[0].copy()
        sender, receiver = _STATES[state](both)
        if state == "a part is committed":
            written = both.decode.pool.layers[0].copy()
        _ENDS[end](both, sender, receiver)
        word = "shutting down" if "shuts down" in end else "given up"
        for leg in (sender, receiver):
            if leg is not None:
                assert word in fails(leg, AT_ONCE)
        _late_leg_fails_too(both, sender, receiver, end)
        wait_until(
            lambda: _nothing_is_held(both) and not any(ledger.balance.values()),
            AT_ONCE,
            f"{both.prefill.manager.counters()} {both.decode.manager.counters()} {ledger.balance}",
        )
        assert receiver is None or receiver.commit() == 0
        assert (both.decode.pool.layers[0] == written).all()
        after = [side.manager.counters()["transfers_failed"] for side in _sides(both)]
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1]
        _slow_pages(both).slow = False
        if "shuts down" not in end:
            both.transfer(2)
            wait_until(both.at_baseline)


def _nothing_is_held(both: Pair) -> bool:
    if both.decode.engine.engine_name != "jax":
        return both.at_baseline()
    # Its library cannot cancel a pull: it drains for as long as what was published is computed.
    held = both.decode.manager.counters()
    return is_baseline(both.prefill.manager) and not held["open_rooms"] + held["pending_pulls"]


def _sides(both: Pair) -> tuple[Side, Side]:
    return both.prefill, both.decode


def _late_leg_fails_too(
    both: Pair, sender: KVSender | None, receiver: KVReceiver | None, end: str
) -> None:
    """The leg that was not there yet comes now, and need not wait to hear of the end."""
    if sender is None:
        assert receiver is not None
        late: KVSender | KVReceiver = both.prefill.manager.open_sender(receiver.room)
    elif receiver is None:
        # Only now does the bootstrap server name its one prefill server for any room.
        wait_until(lambda: both.bootstrap.settled)
        late = both.receiver(sender.room)
    else:
        return
    fails(late, 3.0 if end == "prefill shuts down" else AT_ONCE)
