"""Compiles grammars of clients (https://github.com/guidance-ai/llguidance) within hard limits.

    text ─▶ Trials ─▶ a process that forks ─▶ a child for this text alone ─▶ an error, or what the text costs

A grammar of a few characters may compile for minutes, take all memory, or overflow the compiler's stack, and
that ends the process. So a process that must live first tries each text here. A child compiles it with less
stack, so what compiles there also compiles in a thread of `STACK_BYTES`. If the child dies, the text is
refused.

A router tries what clients write, and a worker tries it again: it trusts no router.
"""

import gc
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple, TypeVar

from llguidance import LLTokenizer
from setproctitle import getproctitle, setproctitle

from baton.grammars.compiler import TOO_MUCH, Alphabet, compiled, error_of
from baton.system.python_path import python_path

T = TypeVar("T")

ENDED = "it cannot be compiled now: the process that compiles has ended"
STACK_BYTES = 8 << 20
"""Of a thread that compiles what was tried."""
_CPU_SECONDS = 2.0
"""Of one text. Routers allow less, also on a machine that is slower than theirs."""
MEMORY_BYTES = 64 << 20
"""Of one text. JSON schemas of the greatest length take 40 MB at most."""
_HANG_SECONDS = 60.0
_RETRY_SECONDS = 0.05
NICE = 5
"""Priority of what compiles."""
_LENGTH = struct.Struct("<I")


@contextmanager
def limited() -> Iterator[None]:
    """For the only thread of a process: its stack is an eighth of what compilers have elsewhere, and its
    memory grows by `MEMORY_BYTES` at most. Otherwise it dies."""
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_STACK, resource.RLIMIT_AS)}
    wanted = STACK_BYTES // 8, _memory()[0] + MEMORY_BYTES
    for (kind, (soft, hard)), most in zip(before.items(), wanted, strict=True):
        resource.setrlimit(kind, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


class Tried(NamedTuple):
    """What came of a text."""

    error: str
    """Empty: it compiles."""
    size: int = 0
    """Bytes that it takes."""
    seconds: float = 0.0
    """CPU time that it took."""


class Trials:
    """Tries one text at a time in processes of its own. For one thread.

    The process that forks starts with the first text, and again if it ends or hangs. It ends with this one.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def try_(self, kind: str, text: str) -> Tried:
        """Waits while the machine has no process left, which is no fault of the text."""
        process = self._process
        if process is None or process.poll() is not None:
            try:
                process = self._process = _patiently(self._started)
            except OSError as error:
                return Tried(f"it cannot be compiled now: {error.strerror}")
            self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        assert process.stdout is not None
        request = json.dumps([kind, text]).encode()
        try:
            process.stdin.write(_LENGTH.pack(len(request)) + request)
            process.stdin.flush()
            if not wait([process.stdout.fileno()], _HANG_SECONDS):
                self.close()
                return Tried(TOO_MUCH, seconds=_HANG_SECONDS)
            if reply := process.stdout.readline():
                return Tried(*json.loads(reply))
        except BrokenPipeError:
            pass
        self.close()
        return Tried(ENDED)

    def _started(self) -> subprocess.Popen[bytes]:
        # A process that reads texts of clients must not have the secrets of this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        env |= python_path()
        command = [*self._command(), str(self._vocab_size), f"{getproctitle()} grammars"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", __name__]

    def close(self) -> None:
        """Ends the processes. A text that is being tried is refused. For any thread."""
        self._end()


def _patiently(start: Callable[[], T]) -> T:
    """Starts a process, again and again while the machine has none left. Raises OSError after a while."""
    deadline = time.monotonic() + _HANG_SECONDS
    while True:
        try:
            return start()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def main(vocab_size: int, title: str) -> None:
    """Tries texts until the pipe is closed."""
    setproctitle(title)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the parent
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = Alphabet(vocab_size).tokenizer()
    compiled(tokenizer, "json_schema", "{}").compute_bitmask()  # what all children need is there
    gc.freeze()
    source = sys.stdin.buffer
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        kind, text = json.loads(source.read(*_LENGTH.unpack(head)))
        reader, writer = os.pipe()
        if not (pid := _patiently(os.fork)):
            os.close(reader)
            _try(tokenizer, kind, text, writer)
        os.close(writer)
        with open(reader, "rb") as pipe:
            reply = pipe.read()
        _, _, usage = os.wait4(pid, 0)
        error, size = json.loads(reply) if reply.endswith(b"]") else (TOO_MUCH, 0)
        sys.stdout.write(json.dumps([error, size, usage.ru_utime + usage.ru_stime]) + "\n")
        sys.stdout.flush()


def _try(tokenizer: LLTokenizer, kind: str, text: str, writer: int) -> None:
    """In the child. Writes the error and the size, and ends the process."""
    try:
        os.dup2(2, 1)  # otherwise the pipe to `Trials` would not end with the process that forks
        os.nice(NICE)
        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)  # ends the process even inside of a library
        before = _anonymous_bytes()
        with limited():
            error = error_of(tokenizer, kind, text)
        size = max(0, _anonymous_bytes() - before)
        os.write(writer, json.dumps([error[:1000], size]).encode())
    finally:
        os._exit(0)


def _anonymous_bytes() -> int:
    _, resident, of_files = _memory()
    return resident - of_files


def _memory() -> list[int]:
    """Bytes of this process: of its addresses, those that are resident, and those of files among these."""
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:3]]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
