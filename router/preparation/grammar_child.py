"""A child process that compiles the grammars of clients.

A grammar may take minutes to compile, or overflow the compiler's stack. Then this process dies, and
`router.child_pool` starts another. A request is JSON, [kind, text]. The reply is JSON too: [error or null,
text for workers]. The script imports no other module of the router, so it starts in a tenth of a second.
"""

import json
import resource
import signal
import struct
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from setproctitle import setproctitle

CPU_SECONDS = 0.5
MEMORY_BYTES = 2 << 30
STACK_BYTES = 1 << 20
"""An eighth of the workers' stack: a grammar that compiles here also compiles there."""
LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Limits of llguidance. Workers set the same."""


def main(name: str) -> None:
    setproctitle(name)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    alphabet = LLTokenizer("byte")
    threading.stack_size(STACK_BYTES)
    length = struct.Struct("<I")
    reply = b""  # the first frame tells the parent that this process is ready
    while True:
        sys.stdout.buffer.write(length.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()
        if not (head := sys.stdin.buffer.read(length.size)):
            return
        kind, text = json.loads(sys.stdin.buffer.read(*length.unpack(head)))
        replies: list[tuple[str | None, str]] = []
        thread = threading.Thread(target=compile_, args=(alphabet, kind, text, replies))
        # The timer's signal ends the process even while the compiler runs.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply = json.dumps(replies[0]).encode()


def compile_(alphabet: LLTokenizer, kind: str, text: str, replies: list[tuple[str | None, str]]) -> None:
    """Adds one reply: the error or None, and the text as workers read it."""
    try:
        match kind:
            case "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            case _:
                text = any_to_lark(text)  # from GBNF, the format of llama.cpp and xgrammar
                grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(alphabet, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        matcher.compute_bitmask()
        replies.append((matcher.get_error() or None, text))
    except Exception as error:  # noqa: BLE001  (the translator from GBNF raises bare Exceptions)
        replies.append((str(error), text))


if __name__ == "__main__":
    main(sys.argv[1])
