"""A child process that composes the grammars of requests, and compiles exactly what workers will compile.

A grammar may take minutes to compile, or overflow the compiler's stack. Then this process dies, and
`router.child_pool` starts another. A request is a `demand.Demand`. The answer is a `demand.Answer`.
"""

import json
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton.engine.api.sampling_params import MAX_LENGTH
from baton.grammars.compiler import TOO_MUCH, Alphabet, error_of
from baton.grammars.trials import limited
from baton.processes.limits import limit_memory
from baton.router import child_pool
from baton.router.api.fields import pointer as pointer_to
from baton.router.api.messages import Tool
from baton.router.api.structured import Structure, calls_or_answer
from baton.router.errors import InvalidRequest, Unsupported
from baton.router.preparation.demand import Demand, OfferedTool, check_length, read
from baton.router.schemas.enforce import enforceable
from baton.router.tools import harmony
from baton.router.tools.formats import FORMATS
from baton.router.tools.grammar import OF_WHOLE
from baton.router.tools.parser import ToolParser
from baton.router.tools.regex import of_ascii

CPU_SECONDS = 1.5
"""Of one demand. The most tools take 0.3 s on a fast core; a busy or old one takes several times as long."""
MEMORY_BYTES = 2 << 30
_MAX_ENFORCED = 200
"""Tools, with their schemas. Those of further tools that are not strict would take too long to compile, and
are left to the model. So are those for which a grammar has no room."""


def serve() -> None:
    limit_memory(MEMORY_BYTES)
    child_pool.serve(limited()(answer_to), CPU_SECONDS)


def answer_to(request: bytes) -> bytes:
    """Returns a `demand.Answer`. Raises InvalidRequest and Unsupported."""
    demand = read(request)
    try:
        if demand.calls is not None and FORMATS[demand.calls.format].written.pair is None:
            # The whole has the schemas as they are. To compile each of them alone, too, doubles the time.
            with suppress(ValueError, RecursionError, InvalidRequest, Unsupported):
                return _answer(_Composer(demand, alone=False))
        return _answer(_Composer(demand))
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest.at(demand.param, str(error) or TOO_MUCH) from error


def _answer(composer: "_Composer") -> bytes:
    structure = composer.composed()
    if structure is not None and structure not in composer.compiled:
        composer.compile(structure)
    return msgspec.msgpack.encode((structure, composer.unenforced))


@cache
def _alphabet(vocab_size: int) -> LLTokenizer:
    return Alphabet(vocab_size).tokenizer()


class _Composer:
    """Makes of one demand what workers read, and keeps what they cannot enforce."""

    def __init__(self, demand: Demand, *, alone: bool = True) -> None:
        """`alone`: each schema is compiled alone, so that errors name its field, and what the compiler does
        not take is left out."""
        self._demand = demand
        self._alone = alone
        self._alphabet = _alphabet(demand.vocab_size)
        self.compiled: list[Structure] = []
        self.unenforced: list[str] = []

    def composed(self) -> Structure | None:
        """Returns what workers enforce; None: nothing. Raises InvalidRequest and Unsupported."""
        demand = self._demand
        answer = demand.answer and self._part(demand.answer)
        if demand.calls is None:
            return harmony.in_final(answer, self._spell) if answer and demand.in_messages else answer
        calls, tools = demand.calls, list[Tool]()
        room = MAX_LENGTH // 2 - sum(len(offered.tool.function.name) for offered in calls.tools)
        for offered in calls.tools:
            parameters: dict[str, Any] = {"type": "object"}
            if offered.enforced and (
                offered.tool.function.strict or (room > 0 and len(tools) < _MAX_ENFORCED)
            ):
                parameters = self._parameters(offered, FORMATS[calls.format])
                room -= len(json.dumps(parameters))
            elif offered.enforced:
                self._left_out(offered.field, "")
            tools.append(offered.tool.with_parameters(parameters))
        try:
            grammar = FORMATS[calls.format].grammar(
                tools, many=calls.many, spell=self._spell, text=calls.free
            )
        except Unsupported:
            if not calls.free:
                raise
            for offered in calls.tools:  # the model still calls them, as those that are not strict
                if offered.enforced:
                    self._left_out(offered.field, "")
            return None
        if answer is not None:
            before = harmony.final(self._spell) if demand.in_messages else ""
            grammar = calls_or_answer(grammar, answer, before)
        if demand.in_messages:
            grammar = harmony.after_analysis(grammar, self._spell)
        check_length(len(grammar))
        return Structure("grammar", grammar, "tools")

    def _parameters(self, offered: OfferedTool, form: type[ToolParser]) -> dict[str, Any]:
        """Returns the schema that a grammar enforces."""
        strict = bool(offered.tool.function.strict)
        structure = Structure("json_schema", offered.tool.schema_text, offered.field, strict)
        as_json = form.written.pair is None
        given = json.loads(self._part(structure, forms_of_the_whole=as_json).text)
        if strict or as_json:
            return given
        # The format writes arguments one by one, and cannot be held to each schema.
        single = {name: value for name, value in given.items() if name not in OF_WHOLE}
        whole = [name for name in given if name in OF_WHOLE]
        for parameters, lost in ((given, []), (single, whole)):
            try:
                form.grammar([offered.tool.with_parameters(parameters)], many=False, spell=self._spell)
            except Unsupported:
                continue
            for name in lost:
                self._left_out(offered.field, f"/{name}")
            return parameters
        self._left_out(offered.field, "")
        return {"type": "object"}

    def _spell(self, text: str) -> str:
        return self._demand.spelled.get(text) or json.dumps(text)

    def _part(self, structure: Structure, *, forms_of_the_whole: bool = True) -> Structure:
        """`forms_of_the_whole`: as of `schemas.enforce`. Raises InvalidRequest."""
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

    def _left_out(self, field: str, pointer: str) -> None:
        self.unenforced.append(pointer_to(field) + pointer)

    def _schema(self, structure: Structure, forms_of_the_whole: bool) -> str:
        """Returns the schema that workers enforce, which the compiler takes. Raises ValueError."""
        schema = json.loads(structure.text)
        made, error = enforceable(
            self._alphabet, schema, forms_of_the_whole=forms_of_the_whole, compiles=self._alone
        )
        if error:
            raise ValueError(error)
        for pointer in made.unenforced:
            if structure.strict:
                place, _, keyword = pointer.rpartition("/")
                text = f"{keyword!r} at {place or '/'} cannot be enforced, and strict is true"
                raise InvalidRequest.at(structure.field, text)
            self._left_out(structure.field, structure.pointer + pointer)
        return structure.text if made.schema == schema else json.dumps(made.schema)

    def compile(self, structure: Structure) -> None:
        """Raises InvalidRequest."""
        structure.text.encode()  # a half of a character is no text
        if error := error_of(self._alphabet, structure.kind, structure.text):
            raise InvalidRequest.at(structure.field, error)
