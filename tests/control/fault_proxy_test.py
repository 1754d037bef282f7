# SPDX-License-Identifier: Apache-2.0
"""The network under test must itself do what its name says."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from kvferry.tests.control.fault_proxy import Proxy


@pytest.fixture(name="ends")
def _ends() -> Iterator[tuple[Proxy, socket.socket, socket.socket]]:
    """The proxy, who connects, who is connected to."""
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = proxy.forward("p", listener.getsockname()[1])
        near = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        far = stack.enter_context(listener.accept()[0])
        for end in (near, far):
            end.settimeout(5.0)
        yield proxy, near, far


def test_forwards_both_ways_and_the_end(ends: tuple[Proxy, socket.socket, socket.socket]) -> None:
    _, near, far = ends
    near.sendall(b"up")
    assert far.recv(10) == b"up"
    far.sendall(b"down")
    assert near.recv(10) == b"down"
    far.close()
    assert near.recv(10) == b""


def test_a_cut_loses_nothing_once_it_is_healed(
    ends: tuple[Proxy, socket.socket, socket.socket],
) -> None:
    proxy, near, far = ends
    proxy.cut(["p"], ("up",))
    near.sendall(b"late")
    near.shutdown(socket.SHUT_WR)
    far.sendall(b"down")
    assert near.recv(10) == b"down"
    far.settimeout(0.1)
    with pytest.raises(TimeoutError):
        far.recv(10)
    proxy.heal()
    far.settimeout(5.0)
    assert (far.recv(10), far.recv(10)) == (b"late", b"")


def test_a_reset_reaches_both_ends(ends: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = ends
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    proxy.reset(["p"])
    for end in (near, far):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_delay_delays(ends: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = ends
    proxy.delay(["p"], 0.1)
    began = time.monotonic()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    assert time.monotonic() - began >= 0.1


def test_a_hold_lets_some_through(ends: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = ends
    proxy.hold_after("p", 1)
    far.sendall(b"x")
    assert near.recv(1) == b"x"
    far.sendall(b"y")
    near.settimeout(0.1)
    with pytest.raises(TimeoutError):
        near.recv(1)
    assert proxy.is_held("p")
    proxy.release("p")
    near.settimeout(5.0)
    assert near.recv(1) == b"y"


def test_a_port_where_nobody_listens_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        target = gone.getsockname()[1]
    with Proxy() as proxy:
        port = proxy.forward("p", target)
        # The end may come as early as within `connect`.
        with contextlib.suppress(ConnectionResetError):
            with socket.create_connection(("127.0.0.1", port), timeout=5.0) as near:
                assert near.recv(1) == b""
