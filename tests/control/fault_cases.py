# SPDX-License-Identifier: Apache-2.0
"""What is done to a pair of processes, when, and what must hold afterwards.

`fault_runner` runs a case; `fault_matrix_test` and `make faults` both use that.
"""

import dataclasses
import enum
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Literal

from kvferry.tests.control.fault_member import LegState
from kvferry.tests.control.fault_proxy import BOTH, Direction

# A pull that brings nothing is given up after so many peer timeouts.
PULL_TIMEOUTS = 3
# P's half of a request that comes late comes after so many peer timeouts.
LATE_TIMEOUTS = 1.5
# What a loaded machine may take longer than the time that it is to keep.
MARGIN_SECONDS = 0.3
DELAY_SECONDS = 0.2
CONTROL = ("bootstrap", "side_channel")
DATA = ("engine",)
# Where all bytes of a pull come from the port that peers are told. The others: jax sends its bulk
# from ports that it picks itself, shm (and auto, between processes of one host) from shared memory.
PROXIED_DATA = ("tcp", "zmq")
ENGINES = ("jax", "tcp", "zmq", "shm", "auto")


class Phase(enum.Enum):
    """How far the request is that the fault meets."""

    MEETING = "before the meeting"
    WAITING = "waiting"
    CHUNK = "mid-chunk"
    BEFORE_ACK = "before the acknowledgement"
    AFTER = "after it"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        name: For the table.
        kind: What is done: a signal to the victim, or something to P's network. "replace" is
            "kill" with a successor that starts before the survivor has noticed; "unplug" takes
            everybody's network away, which needs a network namespace.
        victim: Which process, or "net".
        ports: Which of P's ports.
        directions: Which directions of them.
    """

    name: str
    kind: Literal["kill", "replace", "stop", "cut", "delay", "reset", "unplug"]
    victim: Literal["P", "D", "net"] = "net"
    ports: tuple[str, ...] = CONTROL + DATA
    directions: tuple[Direction, ...] = BOTH

    @property
    def signal(self) -> int:
        """What the victim gets."""
        return signal.SIGSTOP if self.kind == "stop" else signal.SIGKILL

    @property
    def is_harmless(self) -> bool:
        """Whether no request may fail."""
        return self.kind == "delay"


FAULTS = (
    Fault("P killed", "kill", "P"),
    Fault("P killed and replaced at once", "replace", "P"),
    Fault("P stopped", "stop", "P"),
    Fault("D killed", "kill", "D"),
    Fault("D killed and replaced at once", "replace", "D"),
    Fault("D stopped", "stop", "D"),
    Fault("packets dropped", "cut"),
    Fault("packets dropped, control ports only", "cut", ports=CONTROL),
    Fault("packets dropped, data port only", "cut", ports=DATA),
    Fault("half-open: D to P dropped", "cut", directions=("up",)),
    Fault("half-open: P to D dropped", "cut", directions=("down",)),
    Fault("every packet of the host dropped", "unplug"),
    Fault("packets delayed by 200 ms", "delay"),
    Fault("control connections reset", "reset", ports=CONTROL),
    Fault("data connections reset", "reset", ports=DATA),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    engine: str
    fault: Fault
    phase: Phase

    @property
    def proxied(self) -> bool:
        """Whether P must be behind the proxy."""
        return self.fault.victim == "net" and self.fault.kind != "unplug"

    def __str__(self) -> str:
        return f"{self.engine}: {self.fault.name}, {self.phase.value}"


@dataclasses.dataclass
class Result:
    """What came of a case.

    Attributes:
        case: The case.
        legs: State of each leg of the request at the end, by side; None: it was never opened or
            died with its process.
        noticed: Seconds from the fault, or from a later opening, to the end of each leg that has
            failed.
        probe: Reason and seconds of a new request that was made while the fault lasted.
        bystander: Seconds from the fault to the success of a request of the survivor with a third
            process; None: there was none.
        back: Seconds from the mending of the fault to the next success.
        note: Something to be said in the table.
        problems: What must not be.
    """

    case: Case
    legs: dict[str, LegState | None] = dataclasses.field(default_factory=dict)
    noticed: dict[str, float] = dataclasses.field(default_factory=dict)
    probe: tuple[str, float] | None = None
    bystander: float | None = None
    back: float = 0.0
    note: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)


def cases(engines: Sequence[str], *, may_unplug: bool = False) -> Iterator[Case]:
    """Yields every case that makes sense.

    Args:
        engines: Names of transfer engines.
        may_unplug: Whether this process has a network of its own, that it may take down.
    """
    for engine in engines:
        for fault in FAULTS:
            if fault.ports == DATA and engine not in PROXIED_DATA:
                continue
            if fault.kind == "unplug" and not may_unplug:
                continue
            for phase in Phase:
                yield Case(engine, fault, phase)


def notice_bound(case: Case, peer_timeout: float) -> float:
    """Returns the seconds within which both legs of the request must have ended."""
    fault, bound = case.fault, peer_timeout + MARGIN_SECONDS
    if fault.kind == "delay":
        bound += 4.0
    elif fault.ports == DATA and fault.kind == "cut":
        bound = PULL_TIMEOUTS * peer_timeout + 2 * MARGIN_SECONDS
    elif fault.kind in ("kill", "replace"):
        bound = 1.0  # The kernel tells the other one at once.
    # A request that fails only at the pull has waited for P's late half first.
    late = case.phase is Phase.MEETING and (fault.ports == DATA or fault.kind == "delay")
    return bound + (LATE_TIMEOUTS * peer_timeout if late else 0.0)


def blocks_others(case: Case) -> bool:
    """Whether others are known to have to wait until the victim goes on or dies.

    jax.experimental.transfer has one queue for all peers: one that stops to read blocks them all.
    """
    return case.engine == "jax" and case.fault.name == "D stopped" and case.phase is Phase.CHUNK


def brief(reason: str) -> str:
    """Shortens a reason to what does not change from run to run."""
    reason = re.sub(r"(prefill|bootstrap) server 127\.0\.0\.1:\d+( cannot be asked)?: ", "", reason)
    reason = re.sub(r"^prefill server: ", "", reason)
    reason = re.sub(r"room \d+: |\(127\.0\.0\.1:\d+\)| from 127\.0\.0\.1:\d+", "", reason)
    reason = re.sub(r"pull \d+", "pull", reason)
    return re.sub(r" for \d+(\.\d+)? s\b", "", reason).strip()[:90]


def describe(result: Result) -> str:
    """Says in a line what happened."""
    parts = []
    for side in ("P", "D"):
        leg = result.legs.get(side)
        if leg is not None:
            failed = f"fails ({leg.status}: {brief(leg.reason)})"
            parts.append(f"{side} {'succeeds' if leg.state == 'Success' else failed}")
    if result.probe is not None:
        parts.append(f"a new request meanwhile: {brief(result.probe[0])}")
    if result.note:
        parts.append(result.note)
    return "; ".join(parts)


def noticed(result: Result) -> str:
    """Says in a cell who noticed after what time."""
    parts = [f"{side} {seconds:.2f} s" for side, seconds in sorted(result.noticed.items())]
    if result.probe is not None:
        parts.append(f"new request {result.probe[1]:.2f} s")
    return ", ".join(parts) or "-"


def table(results: Sequence[Result]) -> str:
    """Writes the results as a Markdown table."""
    lines = ["| engine | fault | phase | what happens | noticed after |", "|" + " --- |" * 5]
    for result in results:
        case = result.case
        what = describe(result) + (f" **{'; '.join(result.problems)}**" if result.problems else "")
        lines.append(
            f"| {case.engine} | {case.fault.name} | {case.phase.value} | {what} |"
            f" {noticed(result)} |"
        )
    return "\n".join(lines)
