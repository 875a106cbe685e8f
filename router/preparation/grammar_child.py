"""A child process that composes the grammars of requests, and compiles exactly what workers will compile.

A grammar may take minutes to compile, or overflow the compiler's stack. Then this process dies, and
`router.child_pool` starts another. A request is a `demand.Demand`. The answer is a `Structure`, or None.
"""

import json
from functools import cache

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton.machine.grammars import TOO_MUCH, Alphabet, error_of, limited
from baton.router.api.structured import MAX_LENGTH, Structure
from baton.router.errors import InvalidRequest
from baton.router.preparation import demand, pipe
from baton.router.tools.regex import of_ascii
from baton.router.tools.schema import subschemas

CPU_SECONDS = 0.5
MEMORY_BYTES = 2 << 30
_OF_DRAFT_3 = {"divisibleBy", "extends", "disallow"}


def serve() -> None:
    pipe.limit(MEMORY_BYTES)
    pipe.serve(limited()(answer_to), CPU_SECONDS)


def answer_to(request: bytes) -> Structure | None:
    """Raises InvalidRequest and Unsupported."""
    question = demand.read(request)
    alphabet = _alphabet(question.vocab_size)
    checked: list[Structure] = []

    def check(part: Structure) -> Structure:
        checked.append(_checked(alphabet, part))
        return checked[-1]

    try:
        structure = question.composed(check)
        if structure is not None and structure not in checked:
            _compile(alphabet, structure)
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"{question.param}: {str(error) or TOO_MUCH}", param=question.param) from error
    return structure


@cache
def _alphabet(vocab_size: int) -> LLTokenizer:
    return Alphabet(vocab_size).tokenizer()


def _checked(alphabet: LLTokenizer, part: Structure) -> Structure:
    """Returns a part that a client wrote as workers read it. Raises InvalidRequest."""
    prefix = ""
    try:
        match part.kind:
            case "json_schema":
                prefix = f"invalid {part.field.rpartition('.')[2]!r} schema: "
                text = as_latest_draft(part.text)
            case "regex":
                text = of_ascii(part.text)
            case _:
                text = any_to_lark(part.text)  # from GBNF, the format of llama.cpp and xgrammar
    except Exception as error:  # the translator from GBNF raises bare ones
        raise InvalidRequest(f"{part.field}: {prefix}{str(error) or TOO_MUCH}", param=part.field) from error
    if len(text) > MAX_LENGTH:  # some texts became longer
        raise InvalidRequest(f"{part.field}: {TOO_MUCH}", param=part.field)
    latest = Structure(part.kind, text, part.field)
    _compile(alphabet, latest, prefix)
    return latest


def _compile(alphabet: LLTokenizer, structure: Structure, prefix: str = "") -> None:
    """Raises InvalidRequest."""
    structure.text.encode()  # a half of a character is no text
    if error := error_of(alphabet, structure.kind, structure.text):
        raise InvalidRequest(f"{structure.field}: {prefix}{error}", param=structure.field)


def as_latest_draft(text: str) -> str:
    """Returns a schema without `$schema`, so that no keyword of a later draft is ignored, and without formats
    that llguidance does not know: they are annotations.

    Raises ValueError for a keyword of an earlier draft that would be ignored.
    """
    schema = json.loads(text)
    changed = False
    supported: dict[str, bool] = {}
    for part in subschemas(schema):
        changed |= part.pop("$schema", None) is not None
        for name, value in part.items():
            exclusive = name in ("exclusiveMinimum", "exclusiveMaximum") and value is True
            if exclusive and name.removeprefix("exclusive").lower() not in part:
                raise ValueError(f"{name} must be a number")
            if name in _OF_DRAFT_3 or (name == "required" and isinstance(value, bool)):
                raise ValueError(f"{name} is of draft 3 of JSON Schema, which is not supported")
        if isinstance(name := part.get("format"), str):
            if name not in supported:
                probe = json.dumps({"type": "string", "format": name})
                supported[name] = not error_of(_alphabet(0), "json_schema", probe)
            if not supported[name]:
                del part["format"]
                changed = True
    return json.dumps(schema) if changed else text
