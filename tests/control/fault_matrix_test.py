# SPDX-License-Identifier: Apache-2.0
"""Every fault in every phase with every engine: a few in each run, all with `make test-all`.

`fault_runner` says what must hold; `make faults` prints what came of each case.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.control.engines.registry import engine_names
from kvferry.tests.control.fault_cases import ENGINES, Case, Phase, cases, describe
from kvferry.tests.control.fault_runner import Arena, arena

PEER_TIMEOUT = 1.0
_QUICK = {
    ("P killed", Phase.CHUNK),
    ("P killed and replaced at once", Phase.WAITING),
    ("P stopped", Phase.CHUNK),
    ("D killed", Phase.MEETING),
    ("D stopped", Phase.BEFORE_ACK),
    ("packets dropped", Phase.BEFORE_ACK),
    ("packets dropped, data port only", Phase.CHUNK),
    ("half-open: P to D dropped", Phase.WAITING),
    ("control connections reset", Phase.CHUNK),
    ("data connections reset", Phase.WAITING),
}
_QUICK_ENGINE = "tcp"


def _parameters() -> Iterator[Any]:
    known = [name for name in ENGINES if name in engine_names()]
    # Those that can share processes come one after another.
    for case in sorted(cases(known), key=lambda case: (case.engine, case.proxied)):
        quick = case.engine == _QUICK_ENGINE and (case.fault.name, case.phase) in _QUICK
        yield pytest.param(case, marks=[] if quick else [pytest.mark.slow], id=str(case))


class _Arenas:
    """The processes of the last case, for the next one if it can use them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._open: tuple[tuple[str, bool], Arena] | None = None

    def for_case(self, case: Case) -> Arena:
        key = (case.engine, case.proxied)
        if self._open is None or self._open[0] != key:
            self.close()
            made = arena(case.engine, proxied=case.proxied, peer_timeout=PEER_TIMEOUT)
            self._open = (key, self._stack.enter_context(made))
        return self._open[1]

    def close(self) -> None:
        self._open = None
        self._stack.close()


@pytest.fixture(name="arenas", scope="module")
def _arenas() -> Iterator[_Arenas]:
    arenas = _Arenas()
    yield arenas
    arenas.close()


@pytest.mark.parametrize("case", list(_parameters()))
def test_only_what_is_bound_to_the_victim_fails(arenas: _Arenas, case: Case) -> None:
    result = arenas.for_case(case).run(case)
    assert not result.problems, f"{describe(result)}; {result.problems}"


@pytest.mark.slow
def test_the_whole_network_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """In a network namespace, by the tool that prints the table."""
    command = [sys.executable, "-m", "kvferry.tools.faults", "--peer_timeout_seconds=1"]
    finished = subprocess.run([*command, "--match=every packet"], check=False, timeout=280)
    output, errors = capfd.readouterr()
    if "no network namespaces here" in errors:
        pytest.skip("this user may not make network namespaces")
    assert finished.returncode == 0, output + errors
    assert output.count("every packet") >= len(Phase)
