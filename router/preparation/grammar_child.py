"""A child process that compiles the grammars of clients.

A grammar may take minutes to compile, or overflow the compiler's stack. Then this process dies, and
`router.child_pool` starts another. A request is JSON, [kind, text]. The reply is JSON too: [error or null,
text for workers].
"""

import json
import re
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton.router.preparation import pipe

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
_DIGITS, _WORDS, _SPACES = "0-9", "0-9A-Za-z_", r"\t-\r \x{a0}"
_CLASSES = {
    "d": f"[{_DIGITS}]", "D": f"[^{_DIGITS}]", "w": f"[{_WORDS}]", "W": f"[^{_WORDS}]",
    "s": f"[{_SPACES}]", "S": f"[^{_SPACES}]",
}  # fmt: skip
"""Of a regular expression, as in xgrammar. llguidance would take any character of Unicode."""
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords of a schema whose members are schemas under any name."""
_VALUES = {"enum", "const", "default", "examples"}
"""Keywords of a schema whose members are no schemas."""
_OF_DRAFT_3 = {"divisibleBy", "extends", "disallow"}


def serve() -> None:
    pipe.limit(MEMORY_BYTES)
    alphabet = LLTokenizer("byte")
    threading.stack_size(STACK_BYTES)

    def reply(request: bytes) -> bytes:
        replies: list[tuple[str | None, str]] = []
        thread = threading.Thread(target=compile_, args=(alphabet, *json.loads(request), replies))
        thread.start()
        thread.join()
        return json.dumps(replies[0]).encode()

    pipe.serve(reply, CPU_SECONDS)


def compile_(alphabet: LLTokenizer, kind: str, text: str, replies: list[tuple[str | None, str]]) -> None:
    """Adds one reply: the error or None, and the text as workers read it."""
    try:
        match kind:
            case "json_schema":
                text = as_latest_draft(text)
                grammar = LLMatcher.grammar_from_json_schema(text)
            case "regex":
                text = re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), text, flags=re.DOTALL)
                grammar = LLMatcher.grammar_from_regex(text)
            case _:
                text = any_to_lark(text)  # from GBNF, the format of llama.cpp and xgrammar
                grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(alphabet, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        matcher.compute_bitmask()
        replies.append((matcher.get_error() or None, text))
    except Exception as error:  # noqa: BLE001  (the translator from GBNF raises bare Exceptions)
        replies.append((str(error), text))


def as_latest_draft(text: str) -> str:
    """Returns a schema without `$schema`, so that no keyword of a later draft is ignored.

    Raises ValueError for a keyword of an earlier draft that would be ignored.
    """
    schema = json.loads(text)
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        for name, value in part.items():
            exclusive = name in ("exclusiveMinimum", "exclusiveMaximum") and value is True
            if exclusive and name.removeprefix("exclusive").lower() not in part:
                raise ValueError(f"{name} must be a number")
            if name in _OF_DRAFT_3 or (name == "required" and isinstance(value, bool)):
                raise ValueError(f"{name} is of draft 3 of JSON Schema, which is not supported")
            if name in _MAPS and isinstance(value, dict):
                parts += value.values()
            elif name not in _VALUES:
                parts.append(value)
    if not isinstance(schema, dict) or "$schema" not in schema:
        return text
    return json.dumps({name: value for name, value in schema.items() if name != "$schema"})
