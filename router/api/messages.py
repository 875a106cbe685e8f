"""The messages of a chat and its tools, as clients send them and as chat templates read them."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.router.api.earlier import with_calls
from baton.router.api.fields import (
    UNSEEN,
    ContentInput,
    Items,
    Part,
    ShownImage,
    ShownText,
    content,
    invalid,
    result,
)
from baton.router.api.schemas import in_usual_form
from baton.router.api.validation import refusing

MAX_TOOLS = 2_048
"""The event loop validates them: 11 ms."""
MAX_NAME = 512
FUNCTION_NAME = rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}$"


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else "{}" if value is None else json.dumps(value)


Arguments = Annotated[str, BeforeValidator(_arguments, json_schema_input_type=Any)]
"""The arguments of a call in an earlier message. The model may have written anything: if the request were
refused, each later turn of the conversation would fail, too."""


class _Parsed(dict[str, Any]):
    """Arguments as an object. A template that adds them to a text, as DeepSeek's do, gets their JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def parsed_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object: an empty one, as in vLLM, if the text is none, is cut off
    or is too deep."""
    try:
        parsed = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        parsed = None
    return _Parsed(parsed if isinstance(parsed, dict) else {})


class CalledFunction(Part):
    name: str
    arguments: Arguments = "{}"


class ToolCall(Part):
    """A tool call in an earlier message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def made(cls, call_id: str, name: str, arguments: str) -> Self:
        """Makes a call of what is valid."""
        return cls.model_construct(
            id=call_id, function=CalledFunction.model_construct(name=name, arguments=arguments)
        )


_NO_CALLS = {"tool_calls": {"type": ["array", "null"], "maxItems": 0}, "function_call": {"type": "null"}}
_NO_RESULT = {"tool_call_id": {"type": "null"}}
_BY_ROLE: list[Any] = [
    {
        "properties": {"role": {"const": "tool"}, "tool_call_id": {"type": "string"}} | _NO_CALLS,
        "required": ["tool_call_id"],
    },
    {
        "properties": {"role": {"const": "function"}, "name": {"type": "string"}} | _NO_CALLS | _NO_RESULT,
        "required": ["name"],
    },
    {"properties": {"role": {"const": "assistant"}} | _NO_RESULT},
    {"properties": {"role": {"enum": ["system", "developer", "user"]}} | _NO_CALLS | _NO_RESULT},
]
"""What `Message._check_tool_fields` checks, as JSON schemas."""


WITH_IMAGES = "only messages of role user or tool have images"


def _content(value: Any, info: ValidationInfo) -> Any:
    return result(value) if info.data.get("role") == "tool" else content(value)


class Message(Part):
    model_config = ConfigDict(json_schema_extra={"anyOf": _BY_ROLE})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | list[ShownText | ShownImage],
        BeforeValidator(_content, json_schema_input_type=ContentInput),
    ] = ""
    name: str | None = None
    reasoning: str | None = Field(None, validation_alias=AliasChoices("reasoning", "reasoning_content"))
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """OpenAI's earlier form of a tool call. A message of role function has its result."""

    _refuse_unsupported = refusing({"audio": ()}, nested=True)
    _take_function_call = model_validator(mode="before")(classmethod(with_calls))

    @model_validator(mode="after")
    def _check_tool_fields(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise invalid("only messages of role assistant have tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise invalid("messages of role tool, and no others, have a tool_call_id")
        if self.images and self.role not in ("user", "tool"):
            raise invalid(WITH_IMAGES)
        return self

    @classmethod
    def made(
        cls,
        role: str,
        content: str | list[ShownText | ShownImage],
        *,
        reasoning: str | None = None,
        calls: list[ToolCall] | None = None,
        call_id: str | None = None,
    ) -> Self:
        """Makes a message of the valid parts of another form of a chat."""
        return cls.model_construct(
            role=role, content=content, reasoning=reasoning, tool_calls=calls or None, tool_call_id=call_id
        )

    @property
    def images(self) -> list[ShownImage]:
        """In order."""
        if isinstance(self.content, str):
            return []
        return [part for part in self.content if isinstance(part, ShownImage)]

    def without_images(self) -> Self:
        """The same message with a text in the place of each image."""
        if isinstance(self.content, str):
            return self
        texts = (
            part.text if isinstance(part, ShownText) else UNSEEN.format("an image") for part in self.content
        )
        return self.model_copy(update={"content": "\n".join(texts)})

    @property
    def about_tools(self) -> bool:
        """True if it has tool calls or the result of one."""
        return self.role == "tool" or bool(self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it.

        The role `developer`, OpenAI's newer name, becomes `system`. Arguments become objects.
        """
        message = self.model_dump(exclude_none=True, exclude={"function_call"})
        if not isinstance(self.content, str):
            message["content"] = [
                part if part["type"] == "text" else {"type": "image"} for part in message["content"]
            ]
        if self.role == "developer":
            message["role"] = "system"
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
            # The name in the templates of gpt-oss, which refuse both with a call, and of LFM2.5.
            if not (self.tool_calls and self.content):
                message["thinking"] = self.reasoning
        if not self.tool_calls:
            message.pop("tool_calls", None)
        for call, entry in zip(self.tool_calls or (), message.get("tool_calls", ()), strict=True):
            entry["function"]["arguments"] = parsed_arguments(call.function.arguments)
        return message


SPACED = {"x-guidance": {"whitespace_pattern": r"[ \n\r\t]{1,32}"}}
"""What a schema says of the space between the parts of JSON. Workers allow the same in other JSON."""


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    usual = in_usual_form(schema)
    if usual.get("type", "object") != "object":
        raise invalid("must be the schema of an object")
    return usual


Parameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]


class Function(Part):
    """A function that the model may call.

    Workers enforce `parameters` if the tool is `strict`, or if `tool_choice` demands a call. What they cannot
    enforce is refused by name if the tool is `strict`. Else the response header `x-baton-unenforced` names
    it. It also names a `strict` tool that may be called, if its format of calls cannot be held to the schema.
    """

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: Parameters | None = None
    """JSON schema of an object. None: the function takes no arguments."""
    strict: bool | None = None
    defer_loading: bool | None = None
    """The prompt does not describe the function. Behind it the result of a search does."""


class Tool(Part):
    type: Literal["function"] = "function"
    function: Function

    # The model would see a tool that the client wants to hide from it.
    _refuse_unsupported = refusing({"defer_loading": (False,)}, nested=True)

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"defer_loading"})
        return {"type": "function", "function": function}

    def with_parameters(self, parameters: dict[str, Any]) -> "Tool":
        function = self.function.model_copy(update={"parameters": parameters})
        return self.model_copy(update={"function": function})

    @property
    def schema_text(self) -> str:
        """The JSON schema of the arguments, as workers enforce it."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        schema = {**SPACED, "type": "object", **(self.function.parameters or nothing)}
        schema.pop("$schema", None)  # as `grammar_child` reads it
        return json.dumps(schema)


def described(*tools: Tool) -> str:
    """Returns a text about the tools for a message: the model learns of them there, not at the beginning."""
    return "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)


def more_tools(shown: str) -> str:
    """Returns the text of a message from which on the model may call more tools. `shown`: as `described`
    returns it."""
    return f"More tools:\n{shown}" if shown else ""


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    """A `tool_choice` that names the tool to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(Part):
    """A `tool_choice` that names the tools that may be called. The prompt describes no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools}


def choice_of(
    named: type[Part], allowed: type[Part], unknown: Callable[[str], PydanticCustomError]
) -> PlainValidator:
    """Returns the validator of a `tool_choice`. `named`, `allowed`: its models if it names one tool, or
    several. `unknown`: makes the error for all others."""

    def check(value: Any) -> Any:
        if value in (None, "none", "auto", "required"):
            return value
        kind = value.get("type") if isinstance(value, dict) else None
        try:
            if kind == "allowed_tools":
                return allowed.model_validate(value)
            if kind in get_args(named.model_fields["type"].annotation):
                return named.model_validate(value)
        except ValidationError:
            needs = "must have the name of the function"
            if kind == "allowed_tools":
                needs = "allowed_tools needs a mode, auto or required, and tools by their names"
            raise invalid(needs) from None
        raise unknown("must be none, auto, required, allowed_tools, or a function by its name")

    values = Literal["none", "auto", "required"] | named | allowed | None
    return PlainValidator(check, json_schema_input_type=values)


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None
ToolChoice = Annotated[Choice, choice_of(NamedTool, AllowedToolsChoice, invalid)]
