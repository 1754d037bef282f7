# SPDX-License-Identifier: Apache-2.0
"""One request of two processes, driven as the schedulers of two servers would."""

import itertools

from kvferry.control.kv_poll import KVPoll
from kvferry.tests.control.fault_member import LegState, Member


class DrivenRequest:
    """Both legs of one request.

    Args:
        p: The prefill process.
        d: The decode process.
        pages: D's pages that take the prompt; they are P's first ones.
    """

    numbers = itertools.count(1)

    def __init__(self, p: Member, d: Member, pages: list[int]) -> None:
        self.p, self.d, self.pages = p, d, pages
        self.room = next(self.numbers)
        self.opened = {"P": False, "D": False}
        self._sent = False
        self._seen: dict[str, LegState] = {}

    def open_d(self) -> None:
        self.opened["D"] = True
        self.d("open", room=self.room, host="127.0.0.1", port=self.p.ports["told"])
        self.d("request", room=self.room, pages=self.pages)

    def open_p(self) -> None:
        self.opened["P"] = True
        self.p("open", room=self.room)

    def leg(self, side: str) -> LegState | None:
        """The leg now; None if it was not opened, or its process is gone or stopped."""
        member = self.p if side == "P" else self.d
        if not self.opened[side] or not member.awake:
            return None
        seen = self._seen.get(side)
        if seen is None or not seen.ended:
            seen = self._seen[side] = member.leg(self.room)
        return seen

    def both(self, state: KVPoll) -> bool:
        legs = [self.leg("P"), self.leg("D")]
        for leg in legs:
            assert leg is None or leg.state != "Failed", leg.reason
        return all(leg is not None and leg.state == state.name for leg in legs)

    def send(self, *, wait: bool = True) -> None:
        self._sent = True
        values = {"room": self.room, "pages": list(range(len(self.pages))), "last": True}
        if wait:
            assert self.p("send", **values)
        else:
            self.p.post("send", **values)

    def step(self) -> bool:
        """One turn of both step threads; returns whether all legs that live have ended."""
        p, d = self.leg("P"), self.leg("D")
        if p is not None and p.state == "WaitingForInput" and not self._sent:
            self._sent = True
            self.p("send", room=self.room, pages=list(range(len(self.pages))), last=True)
        if d is not None and not d.ended:
            self.d("commit", room=self.room)
        return all(leg.ended for leg in (p, d) if leg is not None)

    def give_up_p(self) -> None:
        """Aborts P's leg if it has not met D's, which cannot tell a P that it does not know."""
        p = self.leg("P")
        if p is not None and p.state == "Bootstrapping":
            self.p("abort", room=self.room, reason="the decode leg has failed")

    def check_bytes(self, expected: str) -> None:
        assert self.d("digest", pages=self.pages) == expected, f"room {self.room}: other bytes"
