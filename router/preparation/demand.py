"""What a request demands of its output: an answer with a structure, calls of tools, or either of them.

What prepares a body writes down the demand. `GrammarChecker` gives it to a child, which composes the one
grammar that workers enforce, and compiles it (`preparation.grammar_child`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from pydantic import TypeAdapter

from baton.engine.api.sampling_params import MAX_LENGTH
from baton.processes.sandbox.client import ForkServer
from baton.router.api.bodies import ChatOptions, CompletionOptions
from baton.router.api.messages import Tool
from baton.router.api.structured import MAX_GIVEN, Structure
from baton.router.child_pool import ChildPool
from baton.router.errors import InvalidRequest, Unsupported
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.tools import harmony

NO_PLACES: Mapping[str, str] = MappingProxyType({})
_CACHED = 64
"""Valid demands that are remembered, the newest ones."""
_CHILDREN = 3
"""One of them stays free for keys with grammars that compile quickly, and one key has two at most."""


@dataclass(frozen=True)
class OfferedTool:
    """A tool that may be called."""

    tool: Tool
    field: str
    """Of its parameters in the request."""
    enforced: bool
    """The grammar enforces its parameters."""


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

    @property
    def question(self) -> "Question":
        return Question(_ADAPTER.dump_json(self, by_alias=True), self.param)

    @property
    def param(self) -> str:
        """The field to blame for what its parts together do."""
        return "tools" if self.calls is not None or self.answer is None else self.answer.field


class Question(NamedTuple):
    """A demand for the child that answers it."""

    text: bytes
    """JSON, for `read`."""
    param: str
    """As `Demand.param`."""


_ADAPTER: TypeAdapter[Any] = TypeAdapter(Demand)


def read(text: bytes) -> Demand:
    return _ADAPTER.validate_json(text)


def question_of(
    body: ChatOptions | CompletionOptions, tokenizer: ModelTokenizer, places: Mapping[str, str] = NO_PLACES
) -> Question | None:
    """Returns what a body demands; None: nothing. `places`: for the name of each tool the field with its
    schema, if the client sent another form of a chat. Raises InvalidRequest and Unsupported."""
    structure, vocab_size = body.structure, tokenizer.vocab_size
    if structure is not None:
        most = MAX_GIVEN if structure.kind == "json_schema" else MAX_LENGTH
        if not 0 < len(structure.text) <= most:
            text = f"must have 1 to {most} characters, not {len(structure.text)}"
            raise InvalidRequest.at(structure.field, text)
    if not isinstance(body, ChatOptions):
        return None if structure is None else Demand(structure, vocab_size).question
    in_messages = tokenizer.reasoning is not None and tokenizer.reasoning.in_messages
    specials = set(harmony.SPECIALS if in_messages else ())
    if not body.offered_tools:
        if structure is None:
            return None
        return Demand(structure, vocab_size, None, in_messages, _spelled(tokenizer, specials)).question
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
    place = "tools[{}].function.parameters" if body.functions is None else "functions[{}].parameters"
    offered = tuple(
        OfferedTool(
            tool,
            places.get(tool.function.name) or place.format(i),
            enforced=not free or bool(tool.function.strict),
        )
        for i, tool in enumerate(body.tools or ())
        if tool.function.name in callable_
    )
    check_length(sum(len(each.tool.schema_text) for each in offered if each.enforced), MAX_GIVEN)
    return Demand(
        None if body.must_call else structure,
        vocab_size,
        Calls(tool_format.name, offered, body.many_calls, free),
        in_messages,
        _spelled(tokenizer, specials.union(tool_format.specials, tool_format.tokens)),
    ).question


def _spelled(tokenizer: ModelTokenizer, specials: set[str]) -> dict[str, str]:
    return {text: tokenizer.lark(text) for text in specials}


def check_length(characters: int, most: int = MAX_LENGTH) -> None:
    if characters > most:
        text = f"{characters} characters are too many for tool_choice; at most {most}"
        raise InvalidRequest.at("tools", text)


class Answer(NamedTuple):
    structure: Structure | None
    """What workers enforce, as they read it; None: nothing."""
    unenforced: tuple[str, ...] = ()
    """JSON pointers into the client's body: what is left to the model."""


class GrammarChecker:
    """Compiles the grammar of a request before workers get it, so that an invalid one is refused at once.

    The compiler is the workers' (llguidance), over an alphabet of single bytes, with tighter limits than
    theirs. A grammar from a client may hang or crash it. Therefore it runs in a child process
    (`grammar_child`). Has these processes, and remembers which demands were valid.
    """

    def __init__(self, server: ForkServer) -> None:
        self._valid: OrderedDict[bytes, Answer] = OrderedDict()
        self._children = ChildPool(server, "grammars", _CHILDREN, msgspec.msgpack.Decoder(Answer).decode)

    async def check(self, question: Question, key: str) -> Answer:
        """`key` names the client's API key.

        Raises InvalidRequest and Unsupported naming the field, and ApiError when the child cannot start.
        """
        name = hashlib.blake2b(question.text).digest()
        if name not in self._valid:
            too_much = InvalidRequest.at(question.param, "too much to compile")
            self._valid[name], _ = await self._children.ask(key, question.text, too_much=too_much)
            if len(self._valid) > _CACHED:
                self._valid.popitem(last=False)
        return self._valid[name]

    async def close(self) -> None:
        await self._children.close()
