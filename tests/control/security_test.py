# SPDX-License-Identifier: Apache-2.0
import pytest
import zmq

from kvferry.control.security import (
    CurveKeys,
    InsecureBindError,
    check_advertise,
    check_bind,
    endpoint,
    host_port,
    parse_address,
    resolve,
)


def keys() -> CurveKeys:
    server_public, _ = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    return CurveKeys(public_key=public, secret_key=secret, server_key=server_public)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "2001:db8::1"])
def test_anything_else_needs_keys(host: str) -> None:
    with pytest.raises(InsecureBindError, match=f"refusing to listen on {host}: without CURVE"):
        check_bind(host, None)
    check_bind(host, keys())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
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
    assert resolve("127.0.0.9") == "127.0.0.9"
    assert resolve("::1") == "::1"
    assert resolve("localhost") == "127.0.0.1"
    with pytest.raises(OSError):
        resolve("no-such-host.invalid")


def test_keys_secure_both_ends_and_stay_out_of_logs() -> None:
    pair = keys()
    assert pair.secret_key.decode() not in repr(pair)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        pair.secure_server(server)
        with context.socket(zmq.DEALER) as client:
            pair.secure_client(client)
            for each in (server, client):
                assert each.getsockopt(zmq.MECHANISM) == zmq.CURVE
