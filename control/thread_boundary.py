# SPDX-License-Identifier: Apache-2.0
"""The one place of the control layer where any exception is caught: the outer end of a thread."""

import threading
from collections.abc import Callable

from absl import logging


def run_guarded(action: Callable[[], None], label: str) -> BaseException | None:
    """Runs what a thread is there for, so that its failure does not go unseen.

    A thread that dies in silence leaves everyone who waits for it hanging. What comes out here is
    a bug of this software or an interpreter that shuts down: it is logged with its traceback, and
    the caller tells those who wait.

    Args:
        action: What to run.
        label: What it is, for the log.

    Returns:
        What it raised, or None.
    """
    try:
        action()
    except BaseException as error:
        logging.exception("%s failed", label)
        return error
    return None


class GuardedThread(threading.Thread):
    """A daemon thread whose unexpected end can be seen.

    Args:
        action: What it runs.
        name: For logs and stack dumps.

    Attributes:
        failure: Why it has ended, or None if it runs or has ended as it should.
    """

    def __init__(self, action: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._action = action
        self.failure: str | None = None

    def run(self) -> None:
        """See `threading.Thread.run`."""
        error = run_guarded(self._action, f"thread {self.name}")
        if error is not None:
            self.failure = f"thread {self.name} has ended: {error!r}; restart this process"
