"""Child processes of the service process: each is a fresh interpreter, watched through a pidfd."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from baton.kv_transfer.spawn import SECRET_VARIABLE


def spawn(module: str, config: bytes, *, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Runs `module` with `-m` in a fresh interpreter, with `config` as one line on stdin.

    A fork would be unsafe, because this process has threads. The child's environment does not have the
    cluster secret. Must be called in the main thread: the child dies with the thread that spawned it
    (`worker.engine_process.child`).
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
