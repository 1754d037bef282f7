# SPDX-License-Identifier: Apache-2.0
"""Every deliberate mistake in a kernel is caught by the kernels' checks."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvferry.tests.kernels import mutants

_ANSWER_SECONDS = 120.0
# A mutant that waits for a signal that never comes would take that long too.
_HANG_SECONDS = 20.0


@contextlib.contextmanager
def _process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "kvferry.tests.kernels.mutants"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


class _Judge:
    """Asks a process about mutants, and starts another one when it hangs."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._process: subprocess.Popen[str] | None = None

    def verdict(self, name: str, patience_seconds: float) -> str:
        """Returns what the process says about a mutant, "hangs" when it says nothing."""
        if self._process is None:
            self._process = self._stack.enter_context(_process())
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if selector.select(patience_seconds):
                return process.stdout.readline().rstrip("\n")
        process.kill()
        self._process = None
        return "hangs"


@pytest.fixture(name="judge", scope="module")
def _judge() -> Iterator[_Judge]:
    with contextlib.ExitStack() as stack:
        yield _Judge(stack)


@pytest.mark.parametrize("name", [n for n, m in mutants.MUTANTS.items() if not m.hangs])
def test_mutant_fails_a_check(judge: _Judge, name: str) -> None:
    assert judge.verdict(name, _ANSWER_SECONDS).startswith("caught: ")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, m in mutants.MUTANTS.items() if m.hangs])
def test_mutant_hangs_or_fails_a_check(judge: _Judge, name: str) -> None:
    # The first answer includes the start of the process, which must not pass for a hang.
    healthy = "multi_layer_copy: first chunk left out"
    assert judge.verdict(healthy, _ANSWER_SECONDS).startswith("caught: ")
    verdict = judge.verdict(name, _HANG_SECONDS)
    assert verdict == "hangs" or verdict.startswith("caught: ")


def test_mutant_needs_its_place_in_the_source() -> None:
    with pytest.raises(ValueError, match="0 times there"):
        mutants.changed("nothing of it", mutants.Mutant("something", "else"))
