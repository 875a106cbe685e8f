"""How other commands of the same user find a cluster that `baton serve` runs on this machine.

`announce` writes `cluster.json` (mode 0600) into the run directory (mode 0700), with which it goes away. It
has the secret of the cluster, its ports, and the process of `baton serve`. This gives nothing away: the same
user can read the secret in the environment of each role. `secret_of` and `send` get the URL of a router. They
read only directories of this user whose owner lives, which holds their lock.
"""

import fcntl
import ipaddress
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from baton.cluster.supervision.rundir import PREFIX, default_parent

NAME = "cluster.json"
_MOST_BYTES = 16 << 10


@dataclass(frozen=True)
class Announcement:
    """What `baton serve` tells: its process, the HTTP ports of its router, and the secret of its cluster."""

    pid: int
    ports: tuple[int, ...]
    secret: str = field(repr=False)

    def announce(self, run_dir: Path) -> None:
        """Lets commands of this user find the cluster. Raises OSError if the file cannot be written."""
        opened = os.open(run_dir / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(opened, "w") as file:
            json.dump(asdict(self), file)

    @classmethod
    def parse(cls, text: bytes) -> Self:
        fields = json.loads(text)
        return cls(int(fields["pid"]), tuple(map(int, fields["ports"])), str(fields["secret"]))


def secret_of(url: str, run_dir: Path | None) -> bytes | None:
    """The secret of the cluster of this user and machine whose router has the URL; None if there is none.

    run_dir: as `--advanced.run-dir` of its `baton serve`.
    """
    return next((cluster.secret.encode() for cluster, _ in _clusters(url, run_dir)), None)


def send(url: str, run_dir: Path | None, signum: signal.Signals) -> bool:
    """Sends a signal to the `baton serve` of the cluster with the URL. Returns False if there is none."""
    for cluster, directory in _clusters(url, run_dir):
        try:
            process = os.pidfd_open(cluster.pid)
        except ProcessLookupError:
            return False
        try:
            # Another process may have the number by now. An owner that holds its lock has kept it.
            if not _locked(directory):
                return False
            signal.pidfd_send_signal(process, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(process)
        return True
    return False


def _clusters(url: str, run_dir: Path | None) -> Iterator[tuple[Announcement, int]]:
    """Each cluster that has the URL, with its run directory, which is open until the next one."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_local(parts.hostname or ""):
        return
    for path in sorted(default_parent(run_dir).glob(PREFIX + "*")):
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile, or of another user
        try:
            cluster = _read(directory)
            if cluster is not None and port in cluster.ports:
                yield cluster, directory
        finally:
            os.close(directory)


def _read(directory: int) -> Announcement | None:
    if os.fstat(directory).st_uid != os.getuid() or not _locked(directory):
        return None
    try:
        opened = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return None  # the cluster is starting or stopping
    with open(opened, "rb") as file:
        return Announcement.parse(file.read(_MOST_BYTES))


def _locked(directory: int) -> bool:
    """Whether a process holds the lock of a run directory."""
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(directory, fcntl.LOCK_UN)
    return False


def _is_local(host: str) -> bool:
    """Whether a host is this machine: an address of it can be bound here."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_binds(family, str(address[0])) for family, _, _, _, address in addresses)


def _binds(family: int, address: str) -> bool:
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
