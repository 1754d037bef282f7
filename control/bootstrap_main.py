# SPDX-License-Identifier: Apache-2.0
"""Bootstrap server on its own: where decode servers find the prefill server of a request.

    python -m kvferry.control.bootstrap_main --host 127.0.0.1 --bootstrap_port 8998

Needed only when several prefill servers share one address for this: a prefill server without
--bootstrap_host runs a bootstrap server of its own. It keeps nothing on disk; after a restart the
prefill servers register again by themselves, also if their --bootstrap_host is a name that now has
another address. Beyond loopback all of them need the same --curve_key_file; `python -m kvferry.keys
DIR` makes it.
"""

import signal
import sys
import threading
from collections.abc import Sequence

from absl import app, flags, logging

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.keys import CURVE_KEY_FILE_HELP, read_keys
from kvferry.control.security import host_port
from kvferry.control.side_channel import ChannelOptions

_HOST = flags.DEFINE_string(
    "host",
    "127.0.0.1",
    "Numeric address to listen on. Other than loopback it needs --curve_key_file.",
)
_CURVE_KEY_FILE = flags.DEFINE_string("curve_key_file", None, CURVE_KEY_FILE_HELP)
_PORT = flags.DEFINE_integer(
    "bootstrap_port", 8998, "Port to listen on.", lower_bound=1, upper_bound=65535
)
_PEER_TIMEOUT_SECONDS = flags.DEFINE_float(
    "peer_timeout_seconds",
    3.0,
    "A prefill server that is silent for this long is dropped. Need not be that of the servers:"
    " each gives signs of life as often as this one needs them.",
    lower_bound=0.5,
    upper_bound=3600.0,
)
# How soon a supervisor learns that the server's thread has ended.
_WATCH_SECONDS = 1.0


def main(argv: Sequence[str]) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
      argv: the command line without its flags.

    Raises:
      app.UsageError: there are arguments that are not flags.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        keys = read_keys(_CURVE_KEY_FILE.value) if _CURVE_KEY_FILE.value else None
        options = ChannelOptions(peer_timeout_seconds=_PEER_TIMEOUT_SECONDS.value, keys=keys)
        server = ZmqBootstrapServer(_HOST.value, _PORT.value, options=options)
        server.start()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    logging.info("bootstrap server ready on %s", host_port(_HOST.value, _PORT.value))
    while server.failure is None and not stopping.wait(_WATCH_SECONDS):
        pass
    failure = server.failure
    server.stop()
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        sys.exit(1)


def run() -> None:
    """Entry point of the console script."""
    app.run(main)


if __name__ == "__main__":
    run()
