# SPDX-License-Identifier: Apache-2.0
"""Turns itself into a command that the kernel ends when its parent dies.

Usage: `python -I -S guard.py PARENT_PID COMMAND [ARGS...]`. The process becomes the command (same
pid, same exit status), so signals and waits need no relay. It is a file of its own, run by path and
with nothing but the standard library, because a hook between fork and exec is not safe in a parent
that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT_GONE_STATUS = 125


def _end_with_parent() -> None:
    """Asks for SIGKILL at the parent's death; the request survives exec, not fork."""
    if not sys.platform.startswith("linux"):
        return  # elsewhere the children end by the parent's own clean-up only
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def main(argv: list[str]) -> None:
    """Ties this process to its parent and becomes the command.

    Args:
      argv: this file, the parent's pid, the command and its arguments.
    """
    _end_with_parent()
    if os.getppid() != int(argv[1]):
        # The parent died before the request was made, so no signal will come.
        sys.exit(_PARENT_GONE_STATUS)
    try:
        os.execvp(argv[2], argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv)
