"""A child of a helper for one request alone, as a thread has it."""

import socket
import subprocess
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedReader
from typing import NamedTuple

from baton.processes.liveness import HANG_SECONDS
from baton.processes.sandbox.helper import LENGTH
from baton.processes.spawn import spawn

_RETRY_SECONDS = 0.05


class HelperEnded(Exception):
    """The helper has ended, perhaps by `close`. What it did says nothing about the request."""


class Outcome(NamedTuple):
    """What came of a request."""

    reply: bytes
    """Empty: the child died, or hung."""
    seconds: float
    """CPU time of the child."""


class OneShots:
    """Runs one request at a time. For one thread, whose end ends the helper.

    The helper starts with the first request, and again if it has ended. It ends with this object.
    """

    def __init__(self) -> None:
        self._helper: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._control: socket.socket | None = None

    def arguments(self) -> list[str]:
        """Of Python, for the helper. The number of its socket follows."""
        raise NotImplementedError

    def run(self, kind: str, request: bytes) -> Outcome:
        """Waits while the machine has no process left, which is no fault of the request. Raises OSError after
        a while, and HelperEnded."""
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            try:
                if (outcome := self._run(kind, request)) is not None:
                    return outcome
                error = BlockingIOError("no process is left")
            except OSError as failed:
                error = failed
            if time.monotonic() > deadline:
                raise error
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Ends the helper, and with it the child. For any thread."""
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            return spawn(*self.arguments(), str(number), given=b"", pass_fds=[number])

    def _run(self, kind: str, request: bytes) -> Outcome | None:
        """None: the helper could not fork."""
        if self._helper is None or self._helper.poll() is not None:
            self._helper = self._start()
            self._end = weakref.finalize(self, _end, self._helper)
        assert self._control is not None, "the helper runs"
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            ends, theirs_of_end = map(stack.enter_context, socket.socketpair())
            try:
                socket.send_fds(self._control, [kind.encode()], [theirs.fileno(), theirs_of_end.fileno()])
            except BrokenPipeError:
                raise HelperEnded from None
            theirs.close()
            theirs_of_end.close()
            ours.settimeout(HANG_SECONDS)
            replies = stack.enter_context(ours.makefile("rb"))
            try:
                started, reply = _frame(replies), b""
                if started:
                    ours.sendall(LENGTH.pack(len(request)) + request)
                    reply = _frame(replies)
            except TimeoutError:
                self.close()
                return Outcome(b"", HANG_SECONDS)
            except ConnectionError:  # it died while it was told
                started, reply = b"yes", b""
            if not (end := ends.recv(64)):
                raise HelperEnded
            return Outcome(reply, float(end.split()[1])) if started else None


def _frame(replies: BufferedReader) -> bytes:
    """The next frame; nothing if the child has ended."""
    head = replies.read(LENGTH.size)
    return replies.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""


def _end(helper: subprocess.Popen[bytes]) -> None:
    helper.kill()
    helper.wait()
