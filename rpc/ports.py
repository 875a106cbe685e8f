"""Listening addresses: their notation, and the reasons why a process cannot listen."""

from __future__ import annotations

import errno
import socket

_REASONS = {
    errno.EADDRINUSE: "the port is in use; choose another one, or stop the process that listens there",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address",
    errno.EACCES: "this user may not listen there; ports below 1024 need a privilege",
}


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def url_host(host: str) -> str:
    """Returns `host` as written before ":port". An IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def try_port(host: str, port: int) -> None:
    """Raises OSError if a process cannot listen on `host`:`port` now."""
    host = host.strip("[]")
    socket.create_server((host, port), family=family(host)).close()


def cannot_listen(flag: str, host: str, port: int, error: OSError) -> str:
    """Returns the message for the user. `flag` is the option that named the port."""
    reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
    return f"{flag} {port}: cannot listen on {url_host(host)}:{port}: {reason}"
