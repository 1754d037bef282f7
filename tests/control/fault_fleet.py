# SPDX-License-Identifier: Apache-2.0
"""The four processes of a fault arena: P and D, whom the fault is about, and P2 and D2."""

from typing import Any

from kvferry.demo.ports import PortPicker
from kvferry.tests.control.fault_cases import CONTROL, PROXIED_DATA, PULL_TIMEOUTS
from kvferry.tests.control.fault_member import Member
from kvferry.tests.control.fault_proxy import Proxy
from kvferry.tests.control.fault_request import DrivenRequest

_HOLDS = ("open_rooms", "early_rooms", "published_bytes", "published_chunks", "published_keys")
_PULLS = ("pending_pulls", "draining_pulls")


class Fleet:
    """Processes that can be replaced by others on the same ports.

    Args:
        engine: Name of the transfer engine.
        proxy: Stands before P's ports, if any.
        peer_timeout: Silence after which a peer counts as dead, in seconds.

    Attributes:
        members: By name.
        told: Ports that peers are told instead of P's own.
    """

    def __init__(self, engine: str, proxy: Proxy | None, peer_timeout: float) -> None:
        self.members: dict[str, Member] = {}
        self.told: dict[str, int] = {}
        self._engine = engine
        self._peer_timeout = peer_timeout
        # Has everything imported, so that it takes another's place within a moment.
        self._spare = Member()
        picker = PortPicker()
        self._ports = {
            name: {port: picker.pick() for port in ("bootstrap", "side_channel", "engine")}
            for name in ("P", "P2", "D", "D2")
        }
        if proxy is not None:
            names = CONTROL + (("engine",) if engine in (*PROXIED_DATA, "jax") else ())
            self.told = {name: proxy.forward(name, self._ports["P"][name]) for name in names}

    def start_all(self) -> None:
        """Starts every process; those that run are ended first."""
        for name in self._ports:
            self.start(name)

    def start(self, name: str) -> None:
        """Starts a process, in the place of its predecessor if there is one."""
        if name in self.members:
            self.members[name].end()
        ports, role = self._ports[name], "prefill" if name.startswith("P") else "decode"
        told = self.told if name == "P" else {}
        options: dict[str, Any] = {
            "role": role,
            "engine": self._engine,
            "engine_port": ports["engine"],
            "advertise": told,
            "control": {
                "peer_timeout_seconds": self._peer_timeout,
                "orphan_timeout_seconds": 5.0 + 5 * self._peer_timeout,
                "progress_timeout_seconds": 10.0 + 10 * self._peer_timeout,
                "pull_timeout_seconds": PULL_TIMEOUTS * self._peer_timeout,
            },
        }
        if role == "prefill":
            options |= {"seed": ord(name[-1]), "bootstrap_port": ports["bootstrap"]}
            options["control"]["side_channel_port"] = ports["side_channel"]
        member, self._spare = self._spare, Member()
        self.members[name] = member.start(**options)
        member.ports["told"] = told.get("bootstrap", ports["bootstrap"])

    def close(self) -> None:
        """Ends all processes."""
        for member in (*self.members.values(), self._spare):
            member.end()

    def request(self, p: str, d: str, pages: list[int]) -> DrivenRequest:
        """Makes a request of two of the processes; nothing is opened yet."""
        return DrivenRequest(self.members[p], self.members[d], pages)

    def held(self) -> dict[str, dict[str, int]]:
        """Returns what each process holds that it should not hold at rest."""
        counters = {name: member.counters() for name, member in self.members.items()}
        return {
            name: {key: each[key] for key in (*_HOLDS, *_PULLS) if each.get(key)}
            for name, each in counters.items()
        }
