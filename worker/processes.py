"""A child process of the service: a fresh interpreter, watched through a pidfd."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from kv_transfer.spawn import SECRET_VARIABLE


def spawn(module: str, config: bytes, *, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Runs `module` with `-m` in a fresh interpreter (never a fork of a process with threads), with its
    configuration on stdin, and without the cluster secret in its environment.

    To be called in the main thread: the child's life hangs on the thread that spawned it (see
    `worker.child`).
    """
    environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    popen = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=pass_fds, env=environment
    )
    assert popen.stdin is not None
    # Where it is dead already, whoever waits for it will see.
    with contextlib.suppress(BrokenPipeError), popen.stdin:
        popen.stdin.write(config + b"\n")
    return popen


class ChildProcess:
    """A child, watched by the running event loop."""

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
        """Its exit code; negative: the signal that killed it. Any number of tasks may wait."""
        await self._ended.wait()
        code = self._popen.returncode
        assert code is not None
        return code

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process. Nothing if it has ended."""
        if self.running:
            self._popen.kill()

    async def end(self, timeout: float) -> int:
        """Waits for it to end by itself, and kills it when it does not."""
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


def describe_exit(code: int) -> str:
    """For logs: "exited with 3", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"
