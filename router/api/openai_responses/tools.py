"""The tools of /v1/responses, and the functions that a model sees in their place.

A model calls only functions. `functions` gives each tool one, and `Called` says which item a call of it is.

| tool | function | item of a call |
|---|---|---|
| function | the same | `function_call` |
| namespace: a group of functions | `NAMESPACE__NAME` for each | `function_call` with `namespace` |
| custom: its input is free text | one argument, `input` | `custom_tool_call` |
| local_shell | `local_shell` | `local_shell_call` |
| tool_search that the client executes | `tool_search` | `tool_search_call` |

Functions with `defer_loading` wait for a client's search. Its result, an item, describes them to the model.
Tools that OpenAI runs itself have no effect. Form: https://platform.openai.com/docs/api-reference/responses
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from baton.router.api.fields import ByType, Hosted, Items, Part, invalid
from baton.router.api.messages import FUNCTION_NAME, MAX_NAME, Function, Parameters, Tool
from baton.router.api.openai_responses.lark import regex_of
from baton.router.api.validation import refusing

HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "shell",
    "apply_patch", "program",
)  # fmt: skip
"""How the types of tools begin that OpenAI runs or defines itself, and those of items with their calls.
Clients send them to each provider. The model answers without them, as it does not see them."""
INPUT = "input"
"""The argument of a function that stands for a custom tool."""
_BEGINS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_BEGIN = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
_CHARACTERS = re.compile(
    r'([^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r'|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u])|\\["\\/bfnrt])*'
)
"""Whole characters of a JSON string."""
CallKind = Literal["function", "custom", "local_shell", "tool_search"]


class Called(NamedTuple):
    """What a call of a function is to the client."""

    kind: CallKind
    name: str
    namespace: str | None = None
    field: str = ""
    """Of the request: what says of its arguments."""
    enforced: bool = True
    """False: workers cannot hold its arguments to it."""


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model calls a function, as vLLM 0.32 forms it."""
    return f"{namespace}__{name}" if namespace else name


class FunctionTool(Function):
    type: Literal["function"]

    _refuse_other_tools = refusing({"allowed_callers": (["direct"],)}, nested=True)

    def functions(self, field: str, namespace: str | None = None) -> Iterator[tuple[Function, Called]]:
        fields = {name: getattr(self, name) for name in Function.model_fields}
        function = Function.model_construct(**fields | {"name": flat_name(self.name, namespace)})
        yield function, Called("function", self.name, namespace, f"{field}.parameters")


class TextInput(Part):
    type: Literal["text"]


class GrammarInput(Part):
    """The input of a custom tool is a text of this grammar. One that refers to itself has no effect, and the
    response header `x-baton-unenforced` names it."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=1 << 14)]

    @cached_property
    def regex(self) -> str | None:
        """None: no regular expression has the same texts."""
        return self.definition if self.syntax == "regex" else regex_of(self.definition)

    @model_validator(mode="after")
    def _check_definition(self) -> "GrammarInput":
        try:
            _ = self.regex
        except ValueError as error:
            raise invalid(f"definition is not a {self.syntax} grammar: {error}") from None
        return self


class CustomTool(Part):
    type: Literal["custom"]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, ByType(what="formats")] | None = None
    defer_loading: bool | None = None

    def functions(self, field: str, namespace: str | None = None) -> Iterator[tuple[Function, Called]]:
        regex = self.format.regex if isinstance(self.format, GrammarInput) else None
        text = {"type": "string"} if regex is None else {"type": "string", "pattern": f"^(?:{regex})$"}
        function = Function.model_construct(
            name=flat_name(self.name, namespace),
            description=self.description,
            parameters=_object({INPUT: text}, [INPUT]),
            strict=regex is not None,
            defer_loading=self.defer_loading,
        )
        enforced = regex is not None or not isinstance(self.format, GrammarInput)
        yield function, Called("custom", self.name, namespace, f"{field}.format", enforced)


class NamespaceTool(Part):
    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    tools: Items[Annotated[FunctionTool | CustomTool, ByType(what="tools", hosted=HOSTED)]]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = (flat_name(tool.name, self.name) for _, tool in own(self.tools, ""))
        if any(len(name) > MAX_NAME for name in names):
            raise invalid(f"with a tool's name its name must have at most {MAX_NAME - 2} characters")
        return self

    def functions(self, field: str) -> Iterator[tuple[Function, Called]]:
        for place, tool in own(self.tools, f"{field}.tools"):
            yield from tool.functions(place, self.name)


class LocalShellTool(Part):
    type: Literal["local_shell"]

    def functions(self, field: str) -> Iterator[tuple[Function, Called]]:
        text = {"type": "string"}
        parameters = {
            "command": {"type": "array", "items": text},
            "env": {"type": "object", "additionalProperties": text},
            "timeout_ms": {"type": "integer"},
            "user": text,
            "working_directory": text,
        }
        description = "Runs a command on the user's machine. The first string of `command` is the program."
        function = Function.model_construct(
            name=self.type,
            description=description,
            parameters=_object(parameters, ["command"]),
            strict=True,
        )
        yield function, Called("local_shell", self.type, None, field)


class ToolSearchTool(Part):
    """The search of a client. A search that OpenAI executes has no effect, as the model sees all tools."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: Parameters | None = None

    def functions(self, field: str) -> Iterator[tuple[Function, Called]]:
        if self.execution == "client":
            parameters = self.parameters or _object({"query": {"type": "string"}}, ["query"])
            description = self.description or "Finds more tools."
            function = Function.model_construct(
                name=self.type, description=description, parameters=parameters
            )
            yield function, Called("tool_search", self.type, None, f"{field}.parameters")


AnyTool = Annotated[
    FunctionTool | NamespaceTool | CustomTool | LocalShellTool | ToolSearchTool,
    ByType(what="tools", hosted=HOSTED),
]


Placed = Sequence[tuple[str, Any]]
"""Tools that are not hosted, with their places in the request."""


def own(tools: Iterable[Any], field: str) -> Placed:
    return [(f"{field}[{i}]", tool) for i, tool in enumerate(tools) if not isinstance(tool, Hosted)]


def functions(tools: Placed, loaded: Placed) -> tuple[list[Tool], dict[str, Called]]:
    """Returns the functions that the model may call, and what their calls are, by the names of the functions.

    Args:
        tools: those of the request.
        loaded: those that items of the conversation describe. The prompt does not describe them again.
    """
    searched = any(isinstance(tool, ToolSearchTool) and tool.execution == "client" for _, tool in tools)
    found: dict[str, Function] = {}
    called: dict[str, Called] = {}
    deferred = set[str]()
    for described in (tools, loaded):
        for place, tool in described:
            for function, call in tool.functions(place):
                name = function.name
                if described is loaded:
                    deferred.add(name)
                if name not in found:
                    found[name], called[name] = function, call
    offered = [
        function.model_copy(update={"defer_loading": name in deferred})
        for name, function in found.items()
        if name in deferred or not (searched and function.defer_loading)
    ]
    return [Tool.model_construct(function=each) for each in offered], called


class CustomInput:
    """Reads the input of a custom tool from the arguments of its function, as they arrive.

    The parser of calls has made valid JSON of them. What is no object whose first member is an input, is the
    input itself.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._state: Literal["before", "text", "raw", "end"] = "before"

    def push(self, arguments: str) -> str:
        """Returns the text of which later arguments can change nothing."""
        if self._state == "end":
            return ""
        unread = self._unread + arguments
        if self._state == "before":
            if (match := _BEGINS.match(unread)) is None:
                self._unread = unread
                if not _MAY_BEGIN.fullmatch(unread):
                    self._state, self._unread = "raw", ""
                    return unread
                return ""
            self._state, unread = "text", unread[match.end() :]
        if self._state == "raw":
            return unread
        match = _CHARACTERS.match(unread)
        assert match is not None, "it may be empty"
        self._unread = unread[match.end() :]
        if self._unread.startswith('"'):
            self._state = "end"
        return json.loads(f'"{match[0]}"', strict=False).encode("utf-8", "replace").decode()


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": required, "additionalProperties": False,
    }  # fmt: skip
