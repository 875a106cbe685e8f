"""Addresses of both families: where a process listens, and how a host stands before its port."""

import socket

import pytest

from baton.cluster.supervision.runner import own_address
from baton.system.addresses import (
    listening_socket,
    numeric_address,
    split_address,
    try_port,
    url_host,
    without_mapping,
)


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("::", ["127.0.0.1", "::1"]),
        ("[::]", ["127.0.0.1", "::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_a_wildcard_of_ipv6_takes_ipv4_too(host: str, reached: list[str]) -> None:
    with listening_socket(host, 0) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            if address in reached:
                socket.create_connection((address, port)).close()
            else:
                with pytest.raises(OSError):
                    socket.create_connection((address, port))


def test_a_port_that_ipv4_uses_is_not_free_for_both() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError):
        try_port("::", other.getsockname()[1])


def test_without_ipv6_in_the_kernel_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listening_socket("::", 0) as listener:
        assert listener.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("10.0.0.1:80", "10.0.0.1", 80), ("[::1]:80", "::1", 80), ("a.b:1", "a.b", 1)],
)
def test_an_address_is_split_and_joined(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert f"{url_host(host)}:{port}" == address


def test_ipv4_within_ipv6_is_ipv4() -> None:
    found = {each: without_mapping(each) for each in ("::ffff:10.0.0.1", "10.0.0.1", "fd00::1", "fe80::1%lo")}
    assert found == {
        "::ffff:10.0.0.1": "10.0.0.1",
        "10.0.0.1": "10.0.0.1",
        "fd00::1": "fd00::1",
        "fe80::1%lo": "fe80::1%lo",
    }


def test_a_name_gives_an_address_of_ipv4_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numeric_address("[::1]") == "::1"
    both = [(socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert numeric_address("both") == "10.0.0.1"
    del both[1]
    assert numeric_address("six") == "fd00::1"


def test_the_own_address_is_of_the_family_of_the_peer() -> None:
    assert own_address("[::1]:1") == "::1"
    assert own_address("127.0.0.1:1") == "127.0.0.1"
