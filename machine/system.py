"""Ports, directories and child processes: their notation, and what a user is told when the system refuses."""

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import random
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HOSTS = {"--admin-port": "--admin-host", "--kv-port": "--kv-host"}
"""The option of the address, if it is not `--host`."""
_REASONS = {
    errno.EADDRINUSE: "the port is in use; choose another one, or stop the process that listens there",
    errno.EACCES: "this user may not listen there; ports below 1024 need a privilege",
}


_DESCRIPTORS = 65_536
"""As many as the systemd units allow. Some programs do something for each descriptor that they may have."""


def raise_descriptor_limit() -> None:
    """Lets this process and its children open as many files as its hard limit allows, at most `_DESCRIPTORS`.

    Most systems let a process have 1,024 at first, which clients and peers would fill."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def url_host(host: str) -> str:
    """Returns `host` as written before ":port". An IPv6 address gets brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; the host of "[::1]:80" is "::1". Raises ValueError without a port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


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


def make_directory(flag: str, path: Path) -> None:
    """Makes the directory and its parents. `flag`: its option. Raises ValueError that names both if no file
    can be made there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(cannot_write(flag, path, error)) from error


def cannot_write(flag: str, path: Path, error: OSError) -> str:
    """Returns the message for the user."""
    return f"{flag} {path}: {error.strerror}; name a directory that you may write to"


def report(ready_fd: int | None, message: Mapping[str, Any], *, last: bool = False) -> None:
    """Writes a line of JSON into the ready pipe, which the supervisor of this process reads: {"stage": …,
    "fraction": …}, {"ready": …} or {"error": …}. A reader that has gone is ignored."""
    if ready_fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
        if last:
            os.close(ready_fd)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Makes the kernel kill this process when the thread that started it ends, for any reason.

    `parent_pid`: of the process with that thread. If it has ended already, this process ends, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid not in (None, os.getppid()):
        os._exit(1)


def waited_for_cpu(pid: int) -> float:
    """Seconds in which the first thread of a process had no CPU to run on. 0: the kernel does not say."""
    with waits_for_cpu(pid) as waited:
        return waited()


@contextlib.contextmanager
def waits_for_cpu(pid: int) -> Iterator[Callable[[], float]]:
    """Gives `waited_for_cpu` of that process, for many calls: to open its file takes longer than to read."""
    try:
        fd = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return

    def waited() -> float:
        try:
            return int(os.pread(fd, 256, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    try:
        yield waited
    finally:
        os.close(fd)


async def process_end(pid: int) -> None:
    """Returns as soon as the child `pid` is dead. Does not reap it."""
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, dead.set)
    try:
        await dead.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def describe_exit(code: int) -> str:
    """Returns the text for logs, such as "exited with 3" or "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"
