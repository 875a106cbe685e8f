"""What a request demands of its output: an answer with a structure, calls of tools, or either of them.

The router's loop writes down the demand. A child composes the one grammar that workers enforce, and compiles
it (`preparation.grammar_child`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from baton.router.api.bodies import ChatOptions, CompletionOptions
from baton.router.api.messages import Tool
from baton.router.api.structured import MAX_LENGTH, Structure, calls_or_answer
from baton.router.errors import InvalidRequest, Unsupported
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.tools import harmony
from baton.router.tools.formats import FORMATS


@dataclass(frozen=True)
class OfferedTool:
    tool: Tool
    field: str
    """Of its parameters in the request."""
    enforced: bool
    """The grammar enforces its parameters."""
    callable: bool


@dataclass(frozen=True)
class Calls:
    format: str
    tools: tuple[OfferedTool, ...]
    many: bool
    """There may be several calls."""
    free: bool
    """A text may precede the calls, or stand for them."""


@dataclass(frozen=True)
class Demand:
    answer: Structure | None
    vocab_size: int
    calls: Calls | None = None
    in_messages: bool = False
    """The output is a list of messages (`harmony`)."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """The forms in a grammar of texts that are tokens."""

    @cached_property
    def text(self) -> bytes:
        """JSON, for `read`."""
        return _ADAPTER.dump_json(self, by_alias=True)

    @property
    def param(self) -> str:
        """The field to blame for what its parts together do."""
        return "tools" if self.calls is not None or self.answer is None else self.answer.field

    def composed(self, checked: Callable[[Structure], Structure]) -> Structure | None:
        """Returns what workers enforce; None: nothing.

        `checked` returns a part that a client wrote as workers read it, or raises InvalidRequest. Also raises
        Unsupported."""
        answer = self.answer and checked(self.answer)
        if self.calls is None:
            return harmony.in_final(answer, self._spell) if answer and self.in_messages else answer
        calls, tools = self.calls, []
        schemas = {offered.field: offered.tool.schema_text for offered in calls.tools if offered.enforced}
        _check_length(sum(map(len, schemas.values())))
        for offered in calls.tools:
            parameters: dict[str, Any] = {"type": "object"}
            if offered.enforced:
                structure = Structure("json_schema", schemas[offered.field], offered.field)
                parameters = json.loads(checked(structure).text)
            if offered.callable:
                tools.append(offered.tool.with_parameters(parameters))
        try:
            grammar = FORMATS[calls.format].grammar(
                tools, many=calls.many, spell=self._spell, text=calls.free
            )
        except Unsupported:
            if calls.free:
                return None  # the model still calls its tools, as those that are not strict
            raise
        if answer is not None:
            before = harmony.final(self._spell) if self.in_messages else ""
            grammar = calls_or_answer(grammar, answer, before)
        if self.in_messages:
            grammar = harmony.after_analysis(grammar, self._spell)
        _check_length(len(grammar))
        return Structure("grammar", grammar, "tools")

    def _spell(self, text: str) -> str:
        return self.spelled.get(text) or json.dumps(text)


_ADAPTER: TypeAdapter[Any] = TypeAdapter(Demand)


def read(text: bytes) -> Demand:
    return _ADAPTER.validate_json(text)


def demand_of(body: ChatOptions | CompletionOptions, tokenizer: ModelTokenizer) -> Demand | None:
    """Returns what a body demands; None: nothing. Raises Unsupported."""
    structure, vocab_size = body.structure, tokenizer.vocab_size
    if not isinstance(body, ChatOptions):
        return None if structure is None else Demand(structure, vocab_size)
    in_messages = tokenizer.reasoning is not None and tokenizer.reasoning.in_messages
    specials = set(harmony.SPECIALS if in_messages else ())
    if not body.offered_tools:
        if structure is None:
            return None
        return Demand(structure, vocab_size, None, in_messages, _spelled(tokenizer, specials))
    tool_format = tokenizer.format_of_calls(forced=body.must_call)
    if tool_format is None:
        text = "this model's tool call format is unknown, see --tool-call-parser"
        if (other := tokenizer.unread_format) is not None:
            text = f"this model's tool call format is that of {other}, see --tool-call-parser"
        raise Unsupported(f"tools is not supported: {text}", param="tools")
    free = not body.must_call and structure is None
    if free and (body.ignore_eos or not any(tool.function.strict for tool in body.offered_tools)):
        return None
    callable_ = {tool.function.name for tool in body.callable_tools}
    offered = tuple(
        OfferedTool(
            tool,
            f"tools[{i}].function.parameters",
            enforced=not free or bool(tool.function.strict),
            callable=tool.function.name in callable_,
        )
        for i, tool in enumerate(body.tools or ())
    )
    return Demand(
        None if body.must_call else structure,
        vocab_size,
        Calls(tool_format.name, offered, body.many_calls, free),
        in_messages,
        _spelled(tokenizer, specials | set(tool_format.specials)),
    )


def _spelled(tokenizer: ModelTokenizer, specials: set[str]) -> dict[str, str]:
    return {text: tokenizer.lark(text) for text in specials}


def _check_length(characters: int) -> None:
    if characters > MAX_LENGTH:
        text = f"tools: {characters} characters are too many for tool_choice; at most {MAX_LENGTH}"
        raise InvalidRequest(text, param="tools")
