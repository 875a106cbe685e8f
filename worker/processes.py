"""A child process of the service: a fresh interpreter, watched through a pidfd."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence


class ChildProcess:
    """Started by the constructor, which must run in the main thread (see `worker.child.begin`).

    `module` is run with `-m` in a fresh interpreter (never a fork of a process with threads); `config` reaches it on
    stdin, never in argv, where every user of the machine could read it.
    """

    def __init__(
        self,
        name: str,
        module: str,
        config: bytes,
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        args: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module, *args], stdin=subprocess.PIPE, pass_fds=pass_fds, env=env
        )
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(config + b"\n")
            self._popen.stdin.close()
        except BrokenPipeError:
            pass  # it is dead already, as whoever waits for it will see
        self._pidfd = os.pidfd_open(self._popen.pid)
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
