# SPDX-License-Identifier: Apache-2.0
"""The one place where any exception is caught: between the scheduler and code it must survive."""

from collections.abc import Callable
from typing import TypeVar

from absl import logging

_T = TypeVar("_T")


def guarded(action: Callable[[], _T], label: str) -> tuple[_T | None, Exception | None]:
    """Runs something whose failure must not spread, and logs it if it fails.

    Used for what belongs to a single request (its callback, its detokenizer), where an exception
    of any kind may end that request and no other, and as the outermost frame of the step thread,
    where it must turn health red and answer every client before the thread ends.

    Args:
        action: what to run.
        label: what it is, for the log.

    Returns:
        Its result and None, or None and the exception.
    """
    try:
        return action(), None
    except Exception as error:
        logging.exception("%s failed", label)
        return None, error
