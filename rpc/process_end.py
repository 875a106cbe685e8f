"""The end of a child process: waits for it, and names it."""

import asyncio
import os
import signal


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
