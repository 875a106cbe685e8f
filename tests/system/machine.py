"""What tests that start and stop whole clusters share: a machine of their own, and a look at its traces."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from baton.processes.tree import alive
from tests.leftovers import SHARED_MEMORY, is_of_ranks, unmapped
from tests.within import WITHIN

BATON = [sys.executable, "-m", "baton.cluster.cli"]
T = TypeVar("T")


def until(what: Callable[[], T | None], within: float, why: str) -> T:
    """Polls what another process does without an event."""
    deadline = time.monotonic() + within
    while (result := what()) is None:
        assert time.monotonic() < deadline, f"not within {within} s: {why}"
        time.sleep(0.1)
    return result


def resident_bytes(pid: int) -> int:
    """The private memory of a process. Shared pages do not count, such as the arena and what a fork has not
    changed."""
    return psutil.Process(pid).memory_full_info().uss


class Machine:
    """What a run may leave traces on: a home and a directory for temporary files of its own, and the rest."""

    def __init__(self) -> None:
        # Short, because sockets go there.
        self.tmp = Path(tempfile.mkdtemp(prefix="bs"))
        self.home = Path(tempfile.mkdtemp(prefix="bh"))
        self.outputs = Path(tempfile.mkdtemp(prefix="bo"))  # what commands print
        ours = ("BATON_", "RAY_", "XDG_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.environment |= {"TMPDIR": str(self.tmp), "HOME": str(self.home)}
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._default_ray = Path("/tmp/ray").exists()

    def baton(self, *args: str, within: float = WITHIN) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return self.python("-m", "baton.cluster.cli", *args, within=within)

    def python(self, *args: str, within: float) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *args]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=within, check=False
        )

    def assert_no_trace(self) -> None:
        left = [str(path.relative_to(self.tmp)) for path in self.tmp.rglob("*")]
        assert left == [], left
        assert [path.name for path in self.home.iterdir()] in ([], [".cache"]), "nothing in ~ but the cache"
        until(lambda: True if not self._left_shared_memory() else None, WITHIN, "no new name in /dev/shm")
        assert Path("/tmp/ray").exists() == self._default_ray
        assert str(self.tmp) not in Path("/proc/net/unix").read_text(), "a socket"

    def _left_shared_memory(self) -> list[str]:
        """New names in /dev/shm whose memory no process maps. Tests that run beside this one map theirs. vLLM
        leaves some, which the run removes."""
        new = (
            entry
            for entry in os.scandir("/dev/shm")
            if entry.name not in self._shared_memory
            and not entry.name.startswith(SHARED_MEMORY)
            and not is_of_ranks(entry)
        )
        return [entry.name for entry in unmapped(new)]

    def remove(self) -> None:
        shutil.rmtree(self.tmp)
        shutil.rmtree(self.home)
        shutil.rmtree(self.outputs)


def tree(pid: int) -> list[psutil.Process]:
    """The living descendants."""
    return list(filter(alive, psutil.Process(pid).children(recursive=True)))


def command_lines(pid: int) -> dict[psutil.Process, str]:
    """Of the living descendants; a role's begins with its title."""
    lines = {}
    for process in tree(pid):
        with contextlib.suppress(OSError):  # gone
            lines[process] = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
    return {process: line for process, line in lines.items() if line}  # one that ends has none


def titled(pid: int, title: str) -> psutil.Process | None:
    """The descendant with this title: `baton 8000: decode 0`."""
    lines = command_lines(pid).items()
    return next((process for process, line in lines if line.partition("\0")[0].strip() == title), None)


def listening(processes: list[psutil.Process]) -> set[int]:
    """The TCP ports that these processes listen on."""
    opened = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has ended meanwhile
            opened += process.net_connections("tcp")
    return {each.laddr.port for each in opened if each.status == psutil.CONN_LISTEN}


def listening_sockets(processes: list[psutil.Process] | None = None) -> set[int]:
    """The inodes of the TCP sockets on which these processes listen, or all of the machine. Another process
    may get the port of one that has ended; the inode of a socket is its own."""
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    listen = {int(row[9]) for row in rows if row[3] == "0A"}
    if processes is None:
        return listen
    opened = set[int]()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    opened |= {int(inode) for inode in re.findall(r"^socket:\[(\d+)\]$", os.readlink(file))}
    return listen & opened
