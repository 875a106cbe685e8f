"""Child processes of the service process: their start, exit and signs of life, and the errors that end it.

Each is a fresh interpreter, watched through a pidfd.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from baton.kv_transfer.spawn import SECRET_VARIABLE

START_SILENCE = 600.0
"""Seconds allowed between two ticks during start-up, which may download, compile or capture graphs."""


class StartError(Exception):
    """The worker cannot start because of a mistake that the user can correct. The message names it."""


class TreeError(Exception):
    """A process of the worker died, hung or sent a wrong message.

    The whole tree ends, and the supervisor starts the next incarnation.
    """


class EngineError(TreeError):
    """The engine process died or hung. An attempt of its last step may be the cause."""


def spawn(module: str, config: bytes, *, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Runs `module` with `-m` in a fresh interpreter, with `config` as one line on stdin.

    A fork would be unsafe, because this process has threads. The child's environment does not have the
    cluster secret. Must be called in the main thread: the child dies with the thread that spawned it
    (`worker.engine_process.start`).
    """
    environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    popen = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=pass_fds, env=environment
    )
    assert popen.stdin is not None
    # If the child is already dead, `ChildProcess.wait` reports its exit.
    with contextlib.suppress(BrokenPipeError), popen.stdin:
        popen.stdin.write(config + b"\n")
    return popen


class ChildProcess:
    """A child process that the running event loop watches."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    async def wait(self) -> int:
        """Returns the exit code, or minus the number of the signal that killed it. Many tasks may wait."""
        await self._ended.wait()
        code = self._popen.returncode
        assert code is not None
        return code

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a stopped process. Does nothing if the process has ended."""
        if self.running:
            self._popen.kill()

    async def end(self, timeout: float) -> int:
        """Waits `timeout` seconds for the process to exit, then kills it. Returns the exit code."""
        try:
            return await asyncio.wait_for(self.wait(), timeout)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._popen.wait()
        self._ended.set()


class Watchdog:
    """Raises `error` from `watch` when the value of `ticks` stays the same for longer than `limit` seconds.

    Counts only time in which this process itself ran. After a pause of the whole machine, the watched process
    can tick before the limit is reached.
    """

    def __init__(
        self, name: str, ticks: Callable[[], int], limit: float, error: type[TreeError] = TreeError
    ) -> None:
        self._name = name
        self._ticks = ticks
        self._limit = limit
        self._error = error
        self._silent = 0.0
        self._checked = 0.0  # time.monotonic()

    def restart(self, limit: float) -> None:
        """A new limit. What was allowed before does not count against it."""
        self._limit, self._silent, self._checked = limit, 0.0, time.monotonic()

    async def watch(self) -> None:
        last, self._checked = self._ticks(), time.monotonic()
        while True:
            interval = min(1.0, self._limit / 4)
            await asyncio.sleep(interval)
            now = time.monotonic()
            elapsed, self._checked = min(now - self._checked, 2 * interval), now
            ticks = self._ticks()
            self._silent = self._silent + elapsed if ticks == last else 0.0
            last = ticks
            if self._silent > self._limit:
                raise self._error(f"{self._name} gave no sign of life for {self._silent:.1f} s")
