# SPDX-License-Identifier: Apache-2.0
"""Free loopback ports."""

import pathlib
import random
import socket

LOOPBACK = "127.0.0.1"
_FIRST_PORT = 10_000
_EPHEMERAL_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL_START = 32_768
_TRIES = 1_000


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_EPHEMERAL_START


class PortPicker:
    """Hands out ports that are free now, none of them twice.

    They lie below the range from which the kernel takes ports for outgoing connections: a port out
    of that range may be gone by the time the server that was promised it binds it.
    """

    def __init__(self) -> None:
        self._given: set[int] = set()
        # Seeded by the system, so that two pickers on one machine rarely meet.
        self._random = random.SystemRandom()
        end = _ephemeral_start()
        self._candidates = range(_FIRST_PORT, end if end > _FIRST_PORT + _TRIES else 65_536)

    def pick(self) -> int:
        """Picks one.

        Returns:
          A TCP port on which nothing listens on the loopback address.

        Raises:
          OSError: none was found in many tries.
        """
        for _ in range(_TRIES):
            port = self._random.choice(self._candidates)
            if port not in self._given and _is_free(port):
                self._given.add(port)
                return port
        raise OSError(
            f"No free TCP port on {LOOPBACK} between {self._candidates.start} and"
            f" {self._candidates.stop - 1} in {_TRIES} tries."
        )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
