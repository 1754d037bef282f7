# SPDX-License-Identifier: Apache-2.0
"""Hurts prefill and decode processes in every way and phase, and prints what came of it.

`make faults`: the table goes to standard output, progress to standard error. The exit status is 1
if anything came out that must not (printed in bold in the table). docs/faults.md keeps the table.

Where `unshare` may make network namespaces, it runs in one of its own: there it can take the whole
network down. Elsewhere those cases are left out, and it says so.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

# For the processes that are started; before anything imports JAX, which reads it once.
os.environ["JAX_PLATFORMS"] = "cpu"

from kvferry.control.engines.registry import engine_names
from kvferry.tests.control.fault_cases import ENGINES, Result, cases, describe, noticed, table
from kvferry.tests.control.fault_runner import run_all

_OWN_NETWORK = "--own_network"


def _enter_own_network(arguments: Sequence[str]) -> None:
    """Starts this program anew in a network namespace; returns only where that is not possible."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return
    attempt = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    if subprocess.run(attempt, capture_output=True, check=False).returncode == 0:
        again = [sys.executable, "-m", "kvferry.tools.faults", _OWN_NETWORK, *arguments]
        os.execvp("unshare", ["unshare", "--net", *again])


def main(arguments: Sequence[str]) -> int:
    """Runs the matrix.

    Args:
        arguments: Command-line arguments.

    Returns:
        The exit status.
    """
    known = [name for name in ENGINES if name in engine_names()]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default=",".join(known), help="which, with commas between")
    parser.add_argument("--match", default="", help="only cases with this in their name")
    parser.add_argument("--peer_timeout_seconds", type=float, default=3.0)
    parser.add_argument(_OWN_NETWORK, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.own_network:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    else:
        _enter_own_network(arguments)
        print("no network namespaces here: the network is never taken down", file=sys.stderr)
    chosen = [
        case
        for case in cases(options.engines.split(","), may_unplug=options.own_network)
        if options.match in str(case)
    ]
    done = 0

    def show(result: Result, seconds: float) -> None:
        nonlocal done
        done += 1
        problems = f"  PROBLEM: {'; '.join(result.problems)}" if result.problems else ""
        line = f"{result.case}: {describe(result)} [{noticed(result)}]{problems}"
        print(f"{done}/{len(chosen)} ({seconds:.1f} s) {line}", file=sys.stderr, flush=True)

    results = run_all(chosen, options.peer_timeout_seconds, show)
    print(table(results))
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
