# SPDX-License-Identifier: Apache-2.0
"""A real prefill or decode server with two bugs that a signal sets off.

SIGUSR1: something on the control thread raises. SIGUSR2: a page is taken from the pool for nobody.
"""

import signal
import sys
import types
from typing import Any

from absl import app

from kvferry.control import flags as kvferry_flags
from kvferry.control import launch
from kvferry.server.service import Service
from kvferry.server.serving import serve


def _serve(web: Any, service: Service, *rest: Any, **more: Any) -> None:
    scheduler: Any = service.scheduler

    def bug() -> None:
        raise KeyError("a bug")

    def break_control(number: int, frame: types.FrameType | None) -> None:
        scheduler._manager.loop.post(bug)

    def lose_a_page(number: int, frame: types.FrameType | None) -> None:
        scheduler.call_soon(lambda: scheduler.allocator.alloc(1))

    signal.signal(signal.SIGUSR1, break_control)
    signal.signal(signal.SIGUSR2, lose_a_page)
    serve(web, service, *rest, **more)


def main(role: str, *args: str) -> None:
    """Serves as prefill_main or decode_main do."""
    launch.serve = _serve  # type: ignore[attr-defined, assignment]
    mode = kvferry_flags.Mode(role)
    app.run(lambda argv: launch.serve_from_flags(argv, mode, 30000), argv=[sys.argv[0], *args])


if __name__ == "__main__":
    main(*sys.argv[1:])
