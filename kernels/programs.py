# SPDX-License-Identifier: Apache-2.0
"""How the programs of this room start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from absl import app, flags


def own_flags() -> flags.FlagValues:
    """Returns where a program defines its flags.

    Not among the flags of all modules: benchmarks that a test imports together share names.
    """
    return flags.FlagValues()  # type: ignore[no-untyped-call]


def run(main: Callable[[Sequence[str]], int | None], program_flags: flags.FlagValues) -> None:
    """Parses the command line and runs a program; does not return.

    Args:
      main: takes the arguments that are not flags and returns the exit code.
      program_flags: what `own_flags` returned, with the program's flags.
    """
    flags.FLAGS.append_flag_values(program_flags)
    program_flags.mark_as_parsed()
    app.run(main)
