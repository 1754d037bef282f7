# SPDX-License-Identifier: Apache-2.0
"""Owns a stack of stand-in servers until a signal ends it; prints their pids as JSON."""

import json
import pathlib
import sys

from kvferry.demo.processes import exit_on_signals
from kvferry.demo.progress import Progress
from kvferry.demo.serve import serve
from kvferry.demo.stack import Role, Stack
from kvferry.tests.e2e import stand_in_server


def stand_in(role: Role) -> list[str]:
    """The command that stands in for a role's main."""
    del role
    return [sys.executable, "-I", stand_in_server.__file__]


def main(state_path: str, *flags: str) -> None:
    """Starts the stack, tells its pids, and serves."""
    exit_on_signals()
    stack = Stack(".", flags={"decode": flags}, command=stand_in)
    with stack:
        assert stack.router is not None
        children = [*(s.process for s in (*stack.prefills, *stack.decodes)), stack.router]
        print(json.dumps([child.pid for child in children]), flush=True)
        serve(stack, pathlib.Path(state_path), Progress(None))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
