"""A process that compiles clients' grammars, so that the router need not.

What a client wrote may take minutes to compile, or overflow the compiler's stack: then this process ends, and
the router starts another (`router.processes.children`). A question is JSON, [kind, text]. So is the answer:
what is wrong or null, and the text for workers. As a script, without the other modules, it starts in a tenth
of a second.
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
"""Workers have eight times as much, so what fits here fits there."""
LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's, as workers set them."""


def main(name: str) -> None:
    setproctitle(name)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    alphabet = LLTokenizer("byte")
    threading.stack_size(STACK_BYTES)
    length = struct.Struct("<I")
    answer = b""  # the first frame says that it is ready
    while True:
        sys.stdout.buffer.write(length.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()
        if not (head := sys.stdin.buffer.read(length.size)):
            return
        kind, text = json.loads(sys.stdin.buffer.read(*length.unpack(head)))
        answers: list[tuple[str | None, str]] = []
        thread = threading.Thread(target=compile_, args=(alphabet, kind, text, answers))
        # Its signal ends the process, whatever the compiler is doing.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = json.dumps(answers[0]).encode()


def compile_(alphabet: LLTokenizer, kind: str, text: str, answers: list[tuple[str | None, str]]) -> None:
    """Adds what is wrong, or None, and the text in the form in which workers understand it."""
    try:
        match kind:
            case "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            case _:
                text = any_to_lark(text)  # of GBNF, which users of llama.cpp and xgrammar write
                grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(alphabet, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        matcher.compute_bitmask()
        answers.append((matcher.get_error() or None, text))
    except Exception as error:  # noqa: BLE001  (the translator from GBNF raises bare ones)
        answers.append((str(error), text))


if __name__ == "__main__":
    main(sys.argv[1])
