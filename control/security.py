# SPDX-License-Identifier: Apache-2.0
"""Where sockets may listen, what may be told to peers, and the keys that widen it.

Without keys a ZMQ socket is open to whoever can reach it, so it may listen on loopback only.
"""

import dataclasses
import errno
import hashlib
import hmac
import ipaddress
import itertools
import socket

import zmq
from zmq.utils import z85

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_MAX_ADDRESSES = 4


class InsecureBindError(ValueError):
    """A socket would listen beyond loopback without keys."""


class InsecureConnectError(ValueError):
    """A socket would connect beyond loopback without keys."""


class PortInUseError(OSError):
    """A port that this process needs is taken by another one."""


def listen_error(host: str, port: int, error: OSError | zmq.ZMQError) -> OSError:
    """Returns what to raise when a socket could not be bound: a `PortInUseError` or another."""
    where = host_port(host, port)
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"port {where} is taken by another process; stop that process or choose another port"
        )
    return OSError(f"cannot listen on {where}: {error}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """The key pair that all processes of a deployment share (RFC 26 of ZeroMQ); see `keys.py`.

    Whoever proves to have the secret key may take part, as a server and as a client; nobody else.

    Attributes:
        public_key: Z85, 40 characters.
        secret_key: Z85, 40 characters.
    """

    public_key: bytes
    secret_key: bytes = dataclasses.field(repr=False)

    @property
    def label(self) -> str:
        """A short digest, by which people can tell whether two processes have the same keys."""
        return hashlib.sha256(self.public_key).hexdigest()[:8]

    def secure_server(self, target: zmq.Socket[bytes]) -> None:
        """Makes a socket, before it is bound, accept only peers that have the same keys.

        It accepts nobody as long as there is no `KeyGate` in its context.
        """
        target.curve_server = True
        target.curve_publickey = self.public_key
        target.curve_secretkey = self.secret_key
        target.zap_domain = self.public_key
        # Without it, libzmq lets everyone in where there is no gate.
        target.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, target: zmq.Socket[bytes]) -> None:
        """Makes a socket, before it connects, accept only a server that has the same keys."""
        target.curve_serverkey = self.public_key
        target.curve_publickey = self.public_key
        target.curve_secretkey = self.secret_key


class KeyGate:
    """Tells libzmq which clients of secured sockets may come in; one per ZMQ context (RFC 27).

    CURVE alone makes a client prove that it has the secret key for whatever public key it shows.
    The gate compares the latter with the one of the deployment.

    Args:
        context: The context of the sockets.

    Attributes:
        socket: To be polled for input, on the thread that calls `answer`.

    Raises:
        zmq.ZMQError: If the context has a gate already (EADDRINUSE).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def answer(self) -> None:
        """Answers what has been asked so far; never blocks."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(_verdict(frames))


def _verdict(frames: list[bytes]) -> list[bytes]:
    # Of libzmq itself, so the form is known: route, "", version, request, domain, address,
    # identity, mechanism, credentials. `secure_server` makes the domain the key that is wanted.
    route, _, version, request, domain = frames[:5]
    mechanism, credentials = frames[7], frames[8:]
    shown = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
    if hmac.compare_digest(shown, domain):
        return [route, b"", version, request, b"200", b"OK", b"", b""]
    return [route, b"", version, request, b"400", b"not the key of this deployment", b"", b""]


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Reads a numeric address.

    Args:
        host: For example "127.0.0.1" or "::1".

    Returns:
        The address; an IPv4 one for "::ffff:127.0.0.1", which is what that means.

    Raises:
        ValueError: If it is a name or nonsense, with the value.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(
            f"host {host!r} is not a numeric IP address; names are not resolved here because a"
            " name that fails to resolve must not turn into a wildcard"
        ) from error
    return getattr(address, "ipv4_mapped", None) or address


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
            " take part; make keys with `python -m kvferry.keys DIR` and give all processes the"
            " file (--curve_key_file), or listen on 127.0.0.1 or ::1"
        )


def check_connect(host: str, keys: CurveKeys | None) -> None:
    """Refuses an address to which a ZMQ socket must not connect.

    Args:
        host: Numeric address.
        keys: Keys of the process, if it has any.

    Raises:
        InsecureConnectError: If `host` is not this machine and there are no keys.
        ValueError: If `host` is not numeric.
    """
    address = parse_address(host)
    if keys is None and not (address.is_loopback or address.is_unspecified):
        raise InsecureConnectError(
            f"refusing to connect to {host}: without CURVE keys anyone could answer there; give all"
            " processes the same --curve_key_file"
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


def known_addresses(host: str) -> list[str]:
    """Returns the addresses of a host that are known without asking anyone.

    Args:
        host: Name or address; IPv6 addresses also in brackets, as they stand in URLs.

    Returns:
        Numeric addresses as sockets take them; none if `host` has to be looked up.
    """
    if host.lower() == "localhost":
        return ["127.0.0.1", "::1"]  # Whatever a name service says (RFC 6761).
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return [str(ipaddress.ip_address(bare))]
    except ValueError:
        return []


def resolve(host: str) -> list[str]:
    """Turns a host name into numeric addresses, IPv4 and IPv6 in turn. May block for seconds.

    Args:
        host: Name or address; IPv6 addresses also in brackets.

    Returns:
        Numeric addresses to try in this order; at least one, at most four.

    Raises:
        OSError: If the name is unknown, naming it.
    """
    known = known_addresses(host)
    if known:
        return known
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: text that no name can be.
        raise OSError(f"host name {host!r} cannot be resolved: {error}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    families = ([a for a in addresses if ":" not in a], [a for a in addresses if ":" in a])
    in_turn = [each for pair in itertools.zip_longest(*families) for each in pair if each]
    return in_turn[:_MAX_ADDRESSES]
