"""Starts processes by exec, and gives them what they need."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from io import BufferedRandom

from baton.system.python_path import python_path

_PREFIX = "BATON_"


def environment() -> dict[str, str]:
    """Of a child: that of this process without what may be a secret of Baton."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
    return kept | python_path()


def spawn(
    *arguments: str,
    given: bytes | None = None,
    pass_fds: Sequence[int] = (),
    output: int | None = None,
    session: bool = False,
) -> subprocess.Popen[bytes]:
    """Runs Python with these arguments in a fresh process. Raises OSError if the machine has none left.

    The child dies with the thread that spawned it if it calls `children.die_with_parent`. So call this from a
    thread that lives as long as the process.

    `given`: its stdin, of any size. None: a pipe, for `tell`. `session`: it gets one of its own, so Ctrl-C in
    a terminal does not reach it.
    """
    with contextlib.ExitStack() as stack:
        stdin: int | BufferedRandom = subprocess.PIPE
        if given is not None:  # a pipe would block this process until the child reads
            stdin = stack.enter_context(os.fdopen(os.memfd_create("given"), "w+b"))
            stdin.write(given)
            stdin.seek(0)
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=stdin,
            stdout=output,
            pass_fds=pass_fds,
            env=environment(),
            start_new_session=session,
        )


def run(
    *arguments: str, program: str = sys.executable, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python, or another program, with these arguments to its end. Returns what it printed."""
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(),
    )


def tell(child: subprocess.Popen[bytes], line: bytes) -> None:
    """Writes all that it gets on stdin. If it is already dead, its exit says so."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(line + b"\n")


def take_given() -> bytes:
    """In a child: returns what `spawn` has given. No other process can read it afterwards."""
    given = sys.stdin.buffer.read()
    os.ftruncate(0, 0)
    return given
