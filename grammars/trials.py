"""Compiles grammars of clients (https://github.com/guidance-ai/llguidance) within hard limits.

    text ─▶ Trials ─▶ a helper (`processes.sandbox`) ─▶ a child for this text ─▶ an error, or what it costs

A grammar of a few characters may compile for minutes, take all memory, or overflow the compiler's stack, and
that ends the process. So a process that must live first tries each text here. A child compiles it with less
stack, so what compiles there also compiles in a thread of `STACK_BYTES`. If the child dies, the text is
refused.

A router tries what clients write, and a worker tries it again: it trusts no router.
"""

import gc
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from llguidance import LLTokenizer
from setproctitle import getproctitle

from baton.grammars.compiler import TOO_MUCH, Alphabet, compiled, error_of
from baton.processes.limits import memory
from baton.processes.sandbox import helper
from baton.processes.sandbox.one_shot import HelperEnded, OneShots

ENDED = "it cannot be compiled now: the process that compiles has ended"
STACK_BYTES = 8 << 20
"""Of a thread that compiles what was tried."""
_CPU_SECONDS = 4.0
"""Of one text. Routers allow less, also on a machine that is slower than theirs."""
MEMORY_BYTES = 64 << 20
"""Of one text. JSON schemas of the greatest length take 40 MB at most."""
_MOST_BYTES = 1 << 30
"""Of a child at any time."""


@contextmanager
def limited() -> Iterator[None]:
    """For the only thread of a process: its stack is an eighth of what compilers have elsewhere, and its
    memory grows by `MEMORY_BYTES` at most. Otherwise it dies."""
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_STACK, resource.RLIMIT_AS)}
    wanted = STACK_BYTES // 8, memory()[0] + MEMORY_BYTES
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


class Trials(OneShots):
    """Tries one text at a time, each in a child of its own."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def arguments(self) -> list[str]:
        return ["-m", __name__, str(self._vocab_size), getproctitle()]

    def try_(self, kind: str, text: str) -> Tried:
        """Waits while the machine has no process left, which is no fault of the text."""
        try:
            reply, seconds = self.run("text", json.dumps([kind, text]).encode())
        except HelperEnded:
            return Tried(ENDED)
        except OSError as error:
            return Tried(f"it cannot be compiled now: {error.strerror}")
        error, size = json.loads(reply) if reply else (TOO_MUCH, 0)
        return Tried(error, size, seconds)


def main(vocab_size: int, title: str, control: int) -> None:
    """Forks children that try texts."""
    tokenizer = Alphabet(vocab_size).tokenizer()
    compiled(tokenizer, "json_schema", "{}").compute_bitmask()  # what all children need is there
    gc.freeze()
    serve = partial(helper.serve, partial(_answer, tokenizer), _CPU_SECONDS, once=True)
    helper.fork_children(control, title, {"text": serve}, _MOST_BYTES, "grammars")


def _answer(tokenizer: LLTokenizer, request: bytes) -> bytes:
    """In the child: the error of the text, and its size."""
    kind, text = json.loads(request)
    before = _anonymous_bytes()
    with limited():
        error = error_of(tokenizer, kind, text)
    return json.dumps([error[:1000], max(0, _anonymous_bytes() - before)]).encode()


def _anonymous_bytes() -> int:
    _, resident, of_files = memory()
    return resident - of_files


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
