# SPDX-License-Identifier: Apache-2.0
"""Free loopback ports."""

import pathlib
import random
import socket

LOOPBACK = "127.0.0.1"
LOOPBACKS = (LOOPBACK, "::1")
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

    def __init__(self, host: str = LOOPBACK) -> None:
        """Starts without having given any.

        Args:
          host: the numeric address on which the ports have to be free.
        """
        self._host = host
        self._given: set[int] = set()
        # Seeded by the system, so that two pickers on one machine rarely meet.
        self._random = random.SystemRandom()
        end = _ephemeral_start()
        self._candidates = range(_FIRST_PORT, end if end > _FIRST_PORT + _TRIES else 65_536)

    def pick(self) -> int:
        """Picks one.

        Returns:
          A TCP port on which nothing listens on the host.

        Raises:
          OSError: none was found in many tries.
        """
        for _ in range(_TRIES):
            port = self._random.choice(self._candidates)
            if port not in self._given and _is_free(self._host, port):
                self._given.add(port)
                return port
        raise OSError(
            f"No free TCP port on {self._host} between {self._candidates.start} and"
            f" {self._candidates.stop - 1} in {_TRIES} tries."
        )


def url_host(host: str) -> str:
    """Writes a host as it stands in URLs.

    Args:
      host: numeric address.

    Returns:
      The address, an IPv6 one in brackets.
    """
    return f"[{host}]" if ":" in host else host


def http_url(host: str, port: int) -> str:
    """Writes the address of a server.

    Args:
      host: numeric address.
      port: port.

    Returns:
      An http:// address without a trailing slash.
    """
    return f"http://{url_host(host)}:{port}"


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
