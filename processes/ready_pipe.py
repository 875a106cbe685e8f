"""The ready pipe of a role: what it tells the process that starts it.

A message is a line of JSON (`baton.processes.children.report`): a stage, the ready line with the addresses of
the role once it serves, or the error that ends it.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, BinaryIO

from baton.processes.children import report

_MAX_LINE = 1 << 16  # bytes of one line


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """Starts a role in a session of its own. `output`: None: that of this process. Returns the role, and the
    pipe for `follow`. Raises OSError or ValueError if it cannot be started."""
    read_end, write_end = os.pipe()
    pipe = os.fdopen(read_end, "rb", 0)
    try:
        popen = subprocess.Popen(
            [*command, "--ready-fd", str(write_end)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(write_end, *pass_fds),
            start_new_session=True,
        )
    except (OSError, ValueError):
        pipe.close()
        raise
    finally:
        os.close(write_end)
    return popen, pipe


def passes_on(ready_fd: int | None) -> Callable[[str, float], None]:
    """A `stage` for `follow` that tells what it is told, in another pipe."""
    return lambda name, fraction: report(ready_fd, {"stage": name, "fraction": fraction})


async def follow(
    pipe: BinaryIO,
    ready: Callable[[Mapping[str, Any]], None],
    stage: Callable[[str, float], None],
    kill: Callable[[], None],
) -> str:
    """Reads the pipe to its end, and closes it. Returns the error that the role reported, or "". Kills a role
    that writes what is no message."""
    reader, error = asyncio.StreamReader(limit=_MAX_LINE), ""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while line := await reader.readline():
            message = json.loads(line)
            if "ready" in message:
                ready(message["ready"])
            elif "stage" in message:
                stage(str(message["stage"]), float(message["fraction"]))
            elif "error" in message:
                error = str(message["error"])
    except (ValueError, KeyError, TypeError) as broken:
        error = f"wrote an invalid line to its ready pipe: {broken}"
        kill()
    finally:
        transport.close()
    return error
