# SPDX-License-Identifier: Apache-2.0
"""Makes sure that a TCP port is ours alone before a library opens it with SO_REUSEPORT.

With SO_REUSEPORT a second server starts on a taken port without an error, and the kernel deals the
connections out between the two.
"""

import contextlib
import socket
import sys

from kvferry.control.security import host_port, listen_error


def claim_port(host: str, port: int) -> contextlib.ExitStack:
    """Checks that nothing listens on a port, and keeps other processes that ask from taking it.

    Args:
        host: Numeric address.
        port: Port; 0 claims nothing, since the kernel then gives a free one.

    Returns:
        The claim; close it when the port is given up.

    Raises:
        PortInUseError: If something listens there, or another process has claimed it.
        OSError: If the address is not one of this machine's.
    """
    claim = contextlib.ExitStack()
    if port == 0:
        return claim
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # SO_REUSEADDR ignores connections that are only winding down, never a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, (host, port), host, port)
    if sys.platform == "linux":
        # The probe is closed before the library binds; an abstract socket closes that gap between
        # processes that use this function, and the kernel frees it with the process.
        lock = claim.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        _bind(lock, f"\0kvferry-port-{host_port(host, port)}", host, port)
    return claim


def _bind(probe: socket.socket, address: tuple[str, int] | str, host: str, port: int) -> None:
    try:
        probe.bind(address)
    except OSError as error:
        probe.close()
        raise listen_error(host, port, error) from error
