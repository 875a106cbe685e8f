"""The child process: its first frame is the tokenizer, and each later frame is a body to prepare."""

import ctypes
import gc
import os
import resource
import signal
import struct
import sys

from setproctitle import setproctitle

from baton.router.errors import ApiError
from baton.router.preparation.prepare import prepare
from baton.router.preparation.wire import encode_crash, encode_error, encode_prepared, read_request
from baton.router.text.tokenizer import ModelTokenizer

CPU_SECONDS = 20
"""Of one body. A signal then ends the process, and the router starts another."""
MEMORY_BYTES = 4 << 30
_NICE = 5
"""A lower priority than the event loop, for machines with few cores."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LENGTH = struct.Struct("<I")


def main(name: str) -> None:
    setproctitle(name)
    # Without this, a busy child would notice the end of the router only after its body.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the router; this process ends with its stdin
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    state = _read()
    if state is None:
        return
    tokenizer = ModelTokenizer.restored(state)
    gc.freeze()
    _write(b"")
    while (request := _read()) is not None:
        # The timer's signal ends the process even inside a library.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = reply_to(request, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(reply)


def reply_to(request: bytes, tokenizer: ModelTokenizer) -> bytes:
    kind, served, history, salt, raw = read_request(request)
    try:
        return encode_prepared(prepare(kind, raw, tokenizer, served, history, salt))
    except ApiError as error:
        return encode_error(error)
    except MemoryError:
        sys.exit(1)  # the memory limit: the router refuses the body
    except Exception as error:  # noqa: BLE001  (a defect: the router logs it)
        return encode_crash(error)


def _read() -> bytes | None:
    """Returns the next frame. None: the router has closed the pipe, or ended within a frame."""
    head = sys.stdin.buffer.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    [size] = _LENGTH.unpack(head)
    frame = sys.stdin.buffer.read(size)
    return frame if len(frame) == size else None


def _write(reply: bytes) -> None:
    sys.stdout.buffer.write(_LENGTH.pack(len(reply)) + reply)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
