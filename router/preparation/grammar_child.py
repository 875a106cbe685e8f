"""A child process that composes the grammars of requests, and compiles exactly what workers will compile.

A grammar may take minutes to compile, or overflow the compiler's stack. Then this process dies, and
`router.child_pool` starts another. A request is a `demand.Demand`. The answer is a `grammar_checker.Answer`.
"""

import json
from functools import cache

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton.engine.api.sampling_params import MAX_LENGTH
from baton.grammars.compiler import TOO_MUCH, Alphabet, error_of
from baton.grammars.trials import limited
from baton.processes.limits import limit_memory
from baton.router.api.fields import pointer as pointer_to
from baton.router.api.structured import Structure
from baton.router.errors import InvalidRequest
from baton.router.preparation import demand, pipe
from baton.router.schemas.enforce import enforceable
from baton.router.tools.regex import of_ascii

CPU_SECONDS = 0.5
MEMORY_BYTES = 2 << 30


def serve() -> None:
    limit_memory(MEMORY_BYTES)
    pipe.serve(limited()(answer_to), CPU_SECONDS)


def answer_to(request: bytes) -> bytes:
    """Returns a `grammar_checker.Answer`. Raises InvalidRequest and Unsupported."""
    question = demand.read(request)
    parts = _Parts(_alphabet(question.vocab_size))
    try:
        structure = question.composed(parts)
        if structure is not None and structure not in parts.compiled:
            parts.compile(structure)
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest.at(question.param, str(error) or TOO_MUCH) from error
    return msgspec.msgpack.encode((structure, parts.unenforced))


@cache
def _alphabet(vocab_size: int) -> LLTokenizer:
    return Alphabet(vocab_size).tokenizer()


class _Parts:
    """As `demand.Parts`, for one demand."""

    def __init__(self, alphabet: LLTokenizer) -> None:
        self._alphabet = alphabet
        self.compiled: list[Structure] = []
        self.unenforced: list[str] = []

    def part(self, structure: Structure, *, forms_of_the_whole: bool = True) -> Structure:
        """As `demand.Parts.part`."""
        prefix = ""
        try:
            match structure.kind:
                case "json_schema":
                    prefix = f"invalid {structure.field.rpartition('.')[2]!r} schema: "
                    text = self._schema(structure, forms_of_the_whole)
                case "regex":
                    text = of_ascii(structure.text)
                case _:
                    text = any_to_lark(structure.text)  # from GBNF, the format of llama.cpp and xgrammar
        except InvalidRequest:
            raise
        except Exception as error:  # the translator from GBNF raises bare ones
            raise InvalidRequest.at(structure.field, f"{prefix}{str(error) or TOO_MUCH}") from error
        if len(text) > MAX_LENGTH:  # some texts became longer
            raise InvalidRequest.at(structure.field, TOO_MUCH)
        latest = Structure(structure.kind, text, structure.field)
        if structure.kind != "json_schema":
            self.compile(latest)
        self.compiled.append(latest)
        return latest

    def left_out(self, field: str, pointer: str) -> None:
        """As `demand.Parts.left_out`."""
        self.unenforced.append(pointer_to(field) + pointer)

    def _schema(self, structure: Structure, forms_of_the_whole: bool) -> str:
        """Returns the schema that workers enforce, which the compiler takes. Raises ValueError."""
        schema = json.loads(structure.text)
        made, error = enforceable(self._alphabet, schema, forms_of_the_whole=forms_of_the_whole)
        if error:
            raise ValueError(error)
        for pointer in made.unenforced:
            if structure.strict:
                place, _, keyword = pointer.rpartition("/")
                text = f"{keyword!r} at {place or '/'} cannot be enforced, and strict is true"
                raise InvalidRequest.at(structure.field, text)
            self.left_out(structure.field, structure.pointer + pointer)
        return structure.text if made.schema == schema else json.dumps(made.schema)

    def compile(self, structure: Structure) -> None:
        """Raises InvalidRequest."""
        structure.text.encode()  # a half of a character is no text
        if error := error_of(self._alphabet, structure.kind, structure.text):
            raise InvalidRequest.at(structure.field, error)
