# SPDX-License-Identifier: Apache-2.0
"""Where sockets may listen, what may be told to peers, and the keys that widen it.

Without keys a ZMQ socket is open to whoever can reach it, so it may listen on loopback only.
"""

import dataclasses
import ipaddress
import socket

import zmq


class InsecureBindError(ValueError):
    """A socket would listen beyond loopback without keys."""


class PortInUseError(OSError):
    """A port that this process needs is taken by another one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """Z85 keys of this process and of the servers it talks to (RFC 32 of ZeroMQ).

    Attributes:
        public_key: This process's public key, 40 characters.
        secret_key: This process's secret key, 40 characters.
        server_key: Public key of the servers that this process connects to.
    """

    public_key: bytes
    secret_key: bytes = dataclasses.field(repr=False)
    server_key: bytes

    def secure_server(self, target: zmq.Socket[bytes]) -> None:
        """Makes a socket, before it is bound, accept only peers that know the server's key."""
        target.curve_server = True
        target.curve_publickey = self.public_key
        target.curve_secretkey = self.secret_key

    def secure_client(self, target: zmq.Socket[bytes]) -> None:
        """Makes a socket, before it connects, prove the server and encrypt."""
        target.curve_serverkey = self.server_key
        target.curve_publickey = self.public_key
        target.curve_secretkey = self.secret_key


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Reads a numeric address.

    Args:
        host: For example "127.0.0.1" or "::1".

    Returns:
        The address.

    Raises:
        ValueError: If it is a name or nonsense, with the value.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(
            f"host {host!r} is not a numeric IP address; names are not resolved here because a"
            " name that fails to resolve must not turn into a wildcard"
        ) from error


def check_bind(host: str, keys: CurveKeys | None) -> None:
    """Refuses an address on which a ZMQ socket must not listen.

    Args:
        host: Numeric address.
        keys: Keys of the process, if it has any.

    Raises:
        InsecureBindError: If `host` is not loopback and there are no keys.
        ValueError: If `host` is not numeric.
    """
    if keys is None and not parse_address(host).is_loopback:
        raise InsecureBindError(
            f"refusing to listen on {host}: without CURVE keys anyone who can reach the port could"
            " take part; listen on 127.0.0.1 or ::1 (the servers' flags take no keys yet)"
        )


def check_advertise(host: str) -> None:
    """Refuses an address that must not be told to peers.

    Args:
        host: Numeric address.

    Raises:
        ValueError: If it is a wildcard (a peer would connect to itself) or not numeric.
    """
    if parse_address(host).is_unspecified:
        raise ValueError(
            f"peers cannot connect to the wildcard {host}; give the address of a network interface"
        )


def endpoint(host: str, port: int | str) -> str:
    """Returns the ZMQ endpoint of a numeric host and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_port(host: str, port: int) -> str:
    """Returns "host:port", IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> str:
    """Turns a host name into a numeric address, IPv4 first. May block for seconds.

    Args:
        host: Name or numeric address.

    Returns:
        A numeric address.

    Raises:
        OSError: If the name is unknown.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass  # A name.
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])
