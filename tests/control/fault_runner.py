# SPDX-License-Identifier: Apache-2.0
"""Runs cases of the fault matrix with real processes.

Four of them: P and D, which the fault is about, and P2 and D2, which must not feel it. Each request
is driven from here as the schedulers of two servers would: P sends when it is asked, D commits what
arrives.
"""

import contextlib
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

from kvferry.control.kv_poll import KVPoll
from kvferry.tests.control.fault_cases import (
    DELAY_SECONDS,
    LATE_TIMEOUTS,
    PROXIED_DATA,
    Case,
    Phase,
    Result,
    blocks_others,
    notice_bound,
)
from kvferry.tests.control.fault_fleet import Fleet
from kvferry.tests.control.fault_member import LONG_PAGES
from kvferry.tests.control.fault_proxy import Proxy
from kvferry.tests.control.fault_request import DrivenRequest
from kvferry.tests.control.pairs import wait_until

_HELD_BYTES = 1 << 20
_SETTLE_SECONDS = 10.0
_BYSTANDER_PAGE, _NEXT_PAGE = 16, 17
_PAUSE_SECONDS = 0.002


class Arena:
    """The processes for the cases of one engine; see `arena`.

    Args:
        engine: Name of the transfer engine.
        proxy: Stands before P's ports, if any.
        peer_timeout: Silence after which a peer counts as dead.
    """

    def __init__(self, engine: str, proxy: Proxy | None, peer_timeout: float) -> None:
        self.peer_timeout = peer_timeout
        self._proxy = proxy
        self._fleet = Fleet(engine, proxy, peer_timeout)
        self._digests: dict[tuple[str, int], str] = {}
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="kvferry-faults-"))

    def open(self) -> None:
        """Starts the processes, which then know each other."""
        self._fleet.start_all()
        for name in ("P", "P2"):
            for count in (1, LONG_PAGES):  # A successor has the same content.
                pages = list(range(count))
                self._digests[name, count] = self._fleet.members[name]("digest", pages=pages)
        for p, d in (("P", "D"), ("P2", "D"), ("P", "D2")):
            self._succeed(self._fleet.request(p, d, [_NEXT_PAGE]))

    def close(self) -> None:
        """Ends all processes."""
        self._fleet.close()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def run(self, case: Case) -> Result:
        """Runs one case; what must not be is in the result's `problems`."""
        result = Result(case)
        try:
            self._run(case, result)
        except (AssertionError, OSError) as error:  # OSError: a process is gone that should live.
            result.problems.append(str(error))
            self._start_anew(result)
        return result

    def _start_anew(self, result: Result) -> None:
        """What has failed must not spoil the next case."""
        if self._proxy is not None:
            self._proxy.heal()
        if result.case.fault.kind == "unplug":
            _set_loopback("up")
        self.open()

    def _run(self, case: Case, result: Result) -> None:
        fault = case.fault
        other = ("P", "D2") if fault.victim == "D" else ("P2", "D")
        bystander = self._fleet.request(*other, [_BYSTANDER_PAGE])
        if fault.kind != "unplug":
            bystander.open_d()
            bystander.open_p()
            wait_until(lambda: bystander.both(KVPoll.WaitingForInput), 5.0, "the bystander waits")
        request = self._fleet.request("P", "D", list(range(LONG_PAGES)))
        since = self._reach(case, request, result)
        if since is None:
            since = self._hurt(case)
        if fault.kind == "replace":
            self._fleet.start(fault.victim)
        self._observe(case, (request, bystander), result, since)
        if fault.kind != "unplug":
            self._watch(case, bystander, result, since)
        if case.phase is Phase.AFTER and fault.victim != "D":
            self._probe(result)
        self._mend(case)
        mended = time.monotonic()
        if blocks_others(case):
            self._watch(case, bystander, result, mended)
        self._serve_again(case, result, mended)
        self._come_to_rest(request, result)

    def _reach(self, case: Case, request: DrivenRequest, result: Result) -> float | None:
        """Brings the request to the phase; returns when the fault came, if it came by itself."""
        request.open_d()
        if case.phase is Phase.MEETING:
            wait_until(lambda: request.p.counters()["early_rooms"] == 1, 5.0, "P hears of the room")
            return None
        request.open_p()
        wait_until(lambda: request.both(KVPoll.WaitingForInput), 5.0, "both legs wait")
        if case.phase is Phase.CHUNK:
            return self._reach_chunk(case, request, result)
        if case.phase is Phase.BEFORE_ACK:
            request.send()
            wait_until(lambda: request.d("arrived", room=request.room), 10.0, "the pages arrive")
        elif case.phase is Phase.AFTER:
            self._succeed(request)
        return None

    def _reach_chunk(self, case: Case, request: DrivenRequest, result: Result) -> float | None:
        if case.proxied and case.engine in PROXIED_DATA:
            assert self._proxy is not None
            self._proxy.hold_after("engine", _HELD_BYTES)
            request.send()
            proxy = self._proxy
            wait_until(lambda: proxy.is_held("engine"), 5.0, "bytes are under way")
            return None
        victim = self._fleet.members["D" if case.fault.victim == "D" else "P"]
        number = 0 if case.fault.victim == "net" else case.fault.signal
        path = self._folder / "fired"
        path.unlink(missing_ok=True)
        request.d("aim", number=number, pid=victim.pid, path=str(path))
        request.send(wait=False)
        wait_until(
            lambda: path.exists() and path.read_text().endswith("\n"), 10.0, "a pull is under way"
        )
        since, ended = path.read_text().split()
        if int(ended):
            result.note = "the pull took less than 20 ms: nothing was in flight"
        if not number:
            return None
        victim.note(number)
        return float(since)

    def _hurt(self, case: Case) -> float:
        fault, since = case.fault, time.monotonic()
        if fault.victim != "net":
            self._fleet.members[fault.victim].signal(fault.signal)
            return since
        if fault.kind == "unplug":
            _set_loopback("down")
            return since
        assert self._proxy is not None
        ports = [name for name in fault.ports if name in self._fleet.told]
        if fault.kind == "cut":
            self._proxy.cut(ports, fault.directions)
        elif fault.kind == "delay":
            self._proxy.delay(ports, DELAY_SECONDS)
        else:
            self._proxy.reset(ports)
        if "engine" in self._fleet.told and not (fault.kind == "cut" and "engine" in fault.ports):
            self._proxy.release("engine")
        return since

    def _mend(self, case: Case) -> None:
        fault = case.fault
        if fault.kind == "kill":
            self._fleet.start(fault.victim)
        elif fault.kind == "stop":
            self._fleet.members[fault.victim].signal(signal.SIGCONT)
        elif fault.kind == "unplug":
            _set_loopback("up")
        elif self._proxy is not None:
            self._proxy.heal()

    def _observe(
        self,
        case: Case,
        requests: tuple[DrivenRequest, DrivenRequest],
        result: Result,
        since: float,
    ) -> None:
        """Waits for the end of the legs that live, which is what noticing means."""
        request, bystander = requests
        late = since + LATE_TIMEOUTS * self.peer_timeout
        deadline = time.monotonic() + notice_bound(case, self.peer_timeout) + 5.0
        while True:
            bystander.step()
            ended = request.step()
            if not request.opened["P"] and request.p.awake:
                # P's half of the request comes late: after what there is to notice, if anything.
                gone = request.p.counters()["early_rooms"] == 0
                if gone or time.monotonic() > late:
                    request.open_p()
                ended = False
            if ended:
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"no end: P {request.leg('P')}, D {request.leg('D')}")
            time.sleep(_PAUSE_SECONDS)
        self._judge(case, request, result, since)

    def _judge(self, case: Case, request: DrivenRequest, result: Result, since: float) -> None:
        bound = notice_bound(case, self.peer_timeout)
        for side in ("P", "D"):
            leg = result.legs[side] = request.leg(side)
            if leg is None or leg.finished is None or leg.finished < since:
                continue
            seconds = leg.finished - max(since, leg.opened)
            if leg.state == "Failed":
                result.noticed[side] = seconds
            if seconds > bound:
                result.problems.append(f"{side} took {seconds:.2f} s, bound {bound:g}")
            if leg.state == "Failed" and case.fault.is_harmless:
                result.problems.append(f"{side} failed: {leg.reason}")
            if leg.state == "Failed" and not (leg.reason and 400 <= leg.status <= 599):
                result.problems.append(f"{side} failed with {leg.status} {leg.reason!r}")
        d = result.legs["D"]
        if d is not None and d.state == "Success":
            request.check_bytes(self._digests["P", len(request.pages)])

    def _watch(self, case: Case, bystander: DrivenRequest, result: Result, since: float) -> None:
        """Completes the request of the survivor with a third process."""
        bound = 0.5 if blocks_others(case) and not result.note else 5.0
        deadline = time.monotonic() + bound
        while not bystander.step() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        if not bystander.both(KVPoll.Success):
            if not blocks_others(case) or result.note:
                raise AssertionError("a request of others is held up")
            result.note = "requests of other D wait until this D goes on or dies"
            return
        leg = bystander.leg("D")
        assert leg is not None and leg.finished is not None
        result.bystander = max(0.0, leg.finished - since)
        name = "P" if bystander.p is self._fleet.members["P"] else "P2"
        bystander.check_bytes(self._digests[name, 1])

    def _probe(self, result: Result) -> None:
        """A new request while the fault lasts."""
        request = self._fleet.request("P", "D", [_NEXT_PAGE])
        began = time.monotonic()
        request.open_d()
        if request.p.awake:
            request.open_p()
        self._end(request, notice_bound(result.case, self.peer_timeout) + 1.0)
        leg = request.leg("D")
        assert leg is not None and leg.finished is not None
        result.probe = (leg.reason or "succeeds", leg.finished - began)

    def _serve_again(self, case: Case, result: Result, mended: float) -> None:
        """The next request works."""
        # With its whole network, P loses the way to its own bootstrap server: it registers anew, or
        # TCP sends again what was lost, after up to seconds.
        patience = self.peer_timeout + 5.0 if case.fault.kind == "unplug" else 0.0
        while True:
            request = self._fleet.request("P", "D", [_NEXT_PAGE])
            request.open_d()
            request.open_p()
            self._end(request, 8.0)
            legs = [request.leg("P"), request.leg("D")]
            failed = [leg.reason for leg in legs if leg and leg.state != "Success"]
            result.back = time.monotonic() - mended
            if not failed:
                break
            assert result.back < patience, f"the next request fails: {' / '.join(failed)}"
        request.check_bytes(self._digests["P", 1])

    def _come_to_rest(self, request: DrivenRequest, result: Result) -> None:
        """Every process is well and holds nothing, and both legs have ended."""
        self._end(request, _SETTLE_SECONDS)
        for side in ("P", "D"):
            result.legs[side] = result.legs.get(side) or request.leg(side)
        for name, member in self._fleet.members.items():
            assert member("failure") is None, f"{name} is broken: {member('failure')}"
        fleet = self._fleet
        wait_until(lambda: not any(fleet.held().values()), _SETTLE_SECONDS, str(fleet.held()))

    def _end(self, request: DrivenRequest, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not request.step():
            d = request.leg("D")
            if d is not None and d.state == "Failed":
                request.give_up_p()  # The router would: it has the answer of one leg.
            if time.monotonic() > deadline:
                legs = f"P {request.leg('P')}, D {request.leg('D')}"
                raise AssertionError(f"not at an end after {seconds:.1f} s: {legs}")
            time.sleep(_PAUSE_SECONDS)

    def _succeed(self, request: DrivenRequest) -> None:
        if not request.opened["D"]:
            request.open_d()
            request.open_p()
        wait_until(
            lambda: request.step() and request.both(KVPoll.Success), 15.0, "a request succeeds"
        )


def _set_loopback(state: str) -> None:
    """Loses every packet, or none; in a network namespace of our own only (tools/faults.py)."""
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


@contextlib.contextmanager
def arena(engine: str, *, proxied: bool, peer_timeout: float) -> Iterator[Arena]:
    """Runs the processes for the cases of one engine, and ends them.

    Args:
        engine: Name of the transfer engine.
        proxied: Whether P is behind a proxy.
        peer_timeout: Silence after which a peer counts as dead, in seconds.
    """
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy()) if proxied else None
        made = Arena(engine, proxy, peer_timeout)
        stack.callback(made.close)
        made.open()
        yield made


def run_all(
    chosen: Iterable[Case], peer_timeout: float, on_result: Callable[[Result, float], None]
) -> list[Result]:
    """Runs cases, with as few arenas as possible.

    Args:
        chosen: What to run.
        peer_timeout: Silence after which a peer counts as dead, in seconds.
        on_result: Called with each result and the seconds that the case took.

    Returns:
        The results, in the order of the cases.
    """
    wanted, results = list(chosen), dict[Case, Result]()
    groups = dict.fromkeys((case.engine, case.proxied) for case in wanted)
    for engine, proxied in groups:
        with arena(engine, proxied=proxied, peer_timeout=peer_timeout) as made:
            for case in wanted:
                if (case.engine, case.proxied) == (engine, proxied):
                    began = time.monotonic()
                    results[case] = made.run(case)
                    on_result(results[case], time.monotonic() - began)
    return [results[case] for case in wanted]
