# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
import zmq

from kvferry.control.keys import make_keys
from kvferry.control.security import (
    CurveKeys,
    InsecureBindError,
    InsecureConnectError,
    KeyGate,
    check_advertise,
    check_bind,
    check_connect,
    endpoint,
    host_port,
    known_addresses,
    parse_address,
    resolve,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "2001:db8::1"])
def test_anything_else_needs_keys(host: str) -> None:
    with pytest.raises(InsecureBindError, match=f"refusing to listen on {host}: without CURVE"):
        check_bind(host, None)
    with pytest.raises(InsecureBindError, match="python -m kvferry.keys DIR.*--curve_key_file"):
        check_bind(host, None)
    check_bind(host, make_keys())


def test_without_keys_nothing_connects_beyond_loopback() -> None:
    for host in ("127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1"):
        check_connect(host, None)
    for host in ("10.0.0.1", "2001:db8::1", "fe80::1%eth0"):
        with pytest.raises(InsecureConnectError, match=f"refusing to connect to {host}: without"):
            check_connect(host, None)
        check_connect(host, make_keys())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    with pytest.raises(ValueError, match=f"cannot connect to the wildcard {host}"):
        check_advertise(host)
    check_advertise("10.0.0.1")


@pytest.mark.parametrize("host", ["localhost", "", "256.1.1.1", "example.com", "127.0.0.1:80"])
def test_names_are_not_addresses(host: str) -> None:
    for check in (parse_address, check_advertise, lambda each: check_bind(each, None)):
        with pytest.raises(ValueError, match="not a numeric IP address"):
            check(host)


def test_text_forms() -> None:
    assert endpoint("127.0.0.1", 5) == "tcp://127.0.0.1:5"
    assert endpoint("::1", "*") == "tcp://[::1]:*"
    assert host_port("::1", 5) == "[::1]:5"


def test_resolving() -> None:
    assert resolve("127.0.0.9") == ["127.0.0.9"]
    assert resolve("::1") == resolve("[::1]") == ["::1"]
    assert resolve("localhost")[0] == "127.0.0.1"
    for wrong in ("no-such-host.invalid", "x" * 300, "a\0b", "\ud800", "[localhost]"):
        with pytest.raises(OSError, match="cannot be resolved"):
            resolve(wrong)


def test_a_name_has_addresses_of_both_families_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("::1", 0, 0, 0), ("::2", 0, 0, 0), ("10.0.0.1", 0), ("10.0.0.1", 0), ("10.0.0.2", 0)]
    entries = [(0, 0, 0, "", address) for address in found]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: entries * 9)
    assert resolve("name") == ["10.0.0.1", "::1", "10.0.0.2", "::2"]


def test_numeric_addresses_are_known_without_a_look_up() -> None:
    for host in ("", "[]", "[::1", "::1]", "[localhost]", "1.2.3", "a.b"):
        assert known_addresses(host) == []
    for host in ("::1", "[::1]", "0::1"):
        assert known_addresses(host) == ["::1"]
    assert known_addresses("10.0.0.1") == ["10.0.0.1"]
    assert known_addresses("localhost") == known_addresses("LocalHost") == ["127.0.0.1", "::1"]


def _greets(client: CurveKeys | None, server: CurveKeys | None, *, gate: bool = True) -> bool:
    """Whether a client gets a message through to a server."""
    with zmq.Context() as context, zmq.Context() as elsewhere:
        keeper = KeyGate(context) if gate else None
        router, dealer = context.socket(zmq.ROUTER), elsewhere.socket(zmq.DEALER)
        for each in (router, dealer):
            each.setsockopt(zmq.LINGER, 0)
        if server is not None:
            server.secure_server(router)
        if client is not None:
            client.secure_client(dealer)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        if keeper is not None:
            poller.register(keeper.socket, zmq.POLLIN)
        arrived = False
        for _ in range(20):
            ready = dict(poller.poll(20))
            if keeper is not None and keeper.socket in ready:
                keeper.answer()
            arrived = arrived or router in ready
            if arrived:
                break
        for each in (router, dealer, *([keeper.socket] if keeper is not None else [])):
            each.close()
    return arrived


def test_only_those_with_the_same_keys_get_in() -> None:
    ours, others = make_keys(), make_keys()
    # Knows the server's public key, as anyone may, and has a valid pair of its own.
    stranger = CurveKeys(public_key=ours.public_key, secret_key=others.secret_key)
    assert _greets(ours, ours)
    assert not _greets(others, ours)
    assert not _greets(stranger, ours)
    assert not _greets(None, ours)
    assert not _greets(ours, None)
    assert _greets(None, None)


def test_a_valid_pair_of_somebody_else_does_not_pass_the_gate() -> None:
    ours, others = make_keys(), make_keys()

    class Knows(CurveKeys):
        def secure_client(self, target: zmq.Socket[bytes]) -> None:
            super().secure_client(target)
            target.curve_publickey, target.curve_secretkey = others.public_key, others.secret_key

    knows = Knows(public_key=ours.public_key, secret_key=ours.secret_key)
    assert not _greets(knows, ours)


def test_without_a_gate_nobody_gets_in() -> None:
    keys = make_keys()
    assert not _greets(keys, keys, gate=False)


def test_one_gate_per_context() -> None:
    with zmq.Context() as context:
        gate = KeyGate(context)
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            KeyGate(context)
        gate.answer()  # Nothing was asked.
        gate.socket.close()


def test_the_secret_key_stays_out_of_logs() -> None:
    keys = make_keys()
    for text in (repr(keys), str(keys), keys.label):
        assert keys.secret_key.decode() not in text
    assert keys.label == dataclasses.replace(keys).label != make_keys().label
