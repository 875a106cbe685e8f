"""Waits for the end of a child process."""

import asyncio
import os


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
