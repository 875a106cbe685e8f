"""Addresses and ports: their notation, and what a user is told when the system refuses one."""

import contextlib
import errno
import ipaddress
import random
import socket

_HOSTS = {"--admin-port": "--advanced.admin-host", "--kv-port": "--advanced.kv-host"}
"""The option of the address, if it is not `--host`."""
WILDCARDS = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - compared, not listened on
"""Hosts that stand for each address of this machine."""
_REASONS = {
    errno.EADDRINUSE: "the port is in use; choose another one, or stop the process that listens there",
    errno.EACCES: "this user may not listen there; ports below 1024 need a privilege",
}


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def url_host(host: str) -> str:
    """Returns `host` as written before ":port". An IPv6 address gets brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; the host of "[::1]:80" is "::1". Raises ValueError without a port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def split_addresses(address: str) -> list[tuple[str, int]]:
    """The hosts of "HOST,HOST:PORT", each with the port. Raises ValueError without a port."""
    hosts, port = split_address(address)
    return [(host.strip("[]"), port) for host in hosts.split(",")]


def numeric_address(name: str) -> str:
    """The address of a host name, an IPv4 address if it has one. Raises OSError if it has none."""
    found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def without_mapping(address: str) -> str:
    """The IPv4 address that a socket for both families writes as ::ffff:10.0.0.1; others as they are."""
    if ":" not in address:
        return address
    mapped = ipaddress.IPv6Address(address).ipv4_mapped
    return address if mapped is None else str(mapped)


def binding(host: str) -> tuple[str, bool]:
    """The address to bind for `host`, and whether its socket takes IPv4 beside IPv6.

    `::` is each address of this machine, of both families. A kernel without IPv6 has those of 0.0.0.0."""
    host = host.strip("[]")
    if host == "::" and not socket.has_dualstack_ipv6():
        return "0.0.0.0", False  # noqa: S104 - what `::` asks for
    return host, host == "::"


def listening_socket(
    host: str, port: int, *, backlog: int | None = None, share: bool = False
) -> socket.socket:
    """Returns a TCP socket that listens. `share`: with SO_REUSEPORT. Raises OSError."""
    host, both = binding(host)
    return socket.create_server(
        (host, port), family=family(host), backlog=backlog, reuse_port=share, dualstack_ipv6=both
    )


def try_port(host: str, port: int) -> None:
    """Raises OSError if a process cannot listen on `host`:`port` now."""
    listening_socket(host, port).close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing uses. Linux gives ports below 32768 to no outgoing connection, so a process may
    listen on this port later, and again after a restart."""
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket(family(host)) as probe, contextlib.suppress(OSError):
            probe.bind((host.strip("[]"), port))
            return port


def cannot_listen(flag: str, host: str, port: int, error: OSError) -> str:
    """Returns the message for the user. `flag` is the option that named the port."""
    number = error.errno or 0
    if number < 0 or number == errno.EADDRNOTAVAIL:  # below 0: that of a resolver, also in a plain OSError
        why = "it is no name of this machine" if number < 0 else "no network interface of this machine has it"
        option = _HOSTS.get(flag, "--host")
        return f"{option} {host}: cannot listen there: {why}; give an address of this machine"
    reason = _REASONS.get(number) or error.strerror or str(error)
    return f"{flag} {port}: cannot listen on {url_host(host)}:{port}: {reason}"
