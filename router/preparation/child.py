"""The child process: gets the tokenizer once, then bodies, and answers with what was made of each."""

import ctypes
import gc
import os
import resource
import signal
import struct
import sys

from setproctitle import setproctitle

from router.errors import ApiError
from router.preparation.prepare import prepare
from router.preparation.wire import answer_of, failure_of, read_question, refusal_of
from router.text.tokenizer import ModelTokenizer

CPU_SECONDS = 20
"""For one body. Then the process is killed, and the router starts another one."""
MEMORY_BYTES = 4 << 30
_NICE = 5
"""The event loop comes first where cores are few."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LENGTH = struct.Struct("<I")


def main(name: str) -> None:
    setproctitle(name)
    # A busy child would notice the end of its stdin only when it has answered.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the router: this process ends with its stdin
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
    while (question := _read()) is not None:
        # Its signal ends the process, whatever the process is doing.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = answered(question, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


def answered(question: bytes, tokenizer: ModelTokenizer) -> bytes:
    kind, served, raw = read_question(question)
    try:
        return answer_of(prepare(kind, raw, tokenizer, served))
    except ApiError as error:
        return refusal_of(error)
    except MemoryError:
        sys.exit(1)  # the limit: the router refuses the body
    except Exception as error:  # noqa: BLE001  (a defect of ours: the router logs it)
        return failure_of(error)


def _read() -> bytes | None:
    head = sys.stdin.buffer.read(_LENGTH.size)
    return sys.stdin.buffer.read(*_LENGTH.unpack(head)) if head else None


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(_LENGTH.pack(len(answer)) + answer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
