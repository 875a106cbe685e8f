"""A child process: what it does itself, and how its parent sees its life and its end."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


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


def become(parent_pid: int, run: Callable[[], int]) -> NoReturn:
    """In a fork: does `run`, and ends with the code that it returns. It never returns into the code of its
    parent, and ends with it."""
    code = 1
    try:
        die_with_parent(parent_pid)
        code = run()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    os._exit(code)


def adopt_orphans(adopts: bool = True) -> None:
    """Makes this process the parent of every descendant whose own parent dies. False: no longer."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


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


class Forked:
    """A child that this process has forked or adopted, with what `Child` uses of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Child:
    """A child process that the running event loop watches and reaps."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes] | Forked, *, session: bool = False) -> None:
        """`session`: it has one of its own. All processes of its group end with it."""
        self.name = name
        self._popen = popen
        self._session = session
        self._exit = asyncio.ensure_future(self._reap())

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._exit.done()

    async def wait(self) -> int:
        """Returns the exit code, or minus the number of the signal that killed it. Many tasks may wait.

        Raises OSError if it cannot be watched. Then it has been killed."""
        return await asyncio.shield(self._exit)

    def signal(self, number: int) -> None:
        """Does nothing if the process has ended."""
        if not self._exit.done():
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a stopped process. Does nothing if it has ended."""
        if not self._exit.done():
            self._kill()

    async def end(self, timeout: float) -> int:
        """Waits `timeout` seconds for the process to exit, then kills it. Returns the exit code."""
        try:
            async with asyncio.timeout(timeout):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _kill(self) -> None:
        if not self._session:
            self._popen.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> int:
        try:
            await process_end(self.pid)
        except Exception:  # no descriptor is left
            self._kill()
            self._popen.wait()
            raise
        if self._session:  # until the child is reaped, no other process can get the id of its group
            self._kill()
        return self._popen.wait()
