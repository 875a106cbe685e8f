"""The body of POST /v1/responses, and its translation into a chat."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from baton.router.api.bodies import Alternatives, ChatBody
from baton.router.api.fields import (
    ByType,
    Content,
    Hosted,
    Items,
    Nullable,
    Part,
    ResultContent,
    ShownImage,
    TemplateSettings,
    invalid,
    text,
    unsupported,
)
from baton.router.api.messages import (
    MAX_TOOLS,
    WITH_IMAGES,
    Arguments,
    Message,
    ToolCall,
    choice_of,
    described,
    more_tools,
)
from baton.router.api.openai_responses.tools import (
    HOSTED,
    INPUT,
    AnyTool,
    Called,
    flat_name,
    functions,
    own,
)
from baton.router.api.sampling import OpenAIBody
from baton.router.api.structured import JsonSchema, ResponseFormat
from baton.router.api.validation import RESPONSES, refusing, validate
from baton.router.errors import InvalidRequest

_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


class ReasoningTextPart(Part):
    type: Literal["reasoning_text", "summary_text"]
    text: str


_TO_REASONING = dict.fromkeys(("reasoning_text", "summary_text"), "text")
ReasoningText = Annotated[
    str,
    BeforeValidator(
        partial(text, kinds=_TO_REASONING), json_schema_input_type=str | list[str | ReasoningTextPart] | None
    ),
]


class MessageItem(Part):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        shown = self.content if isinstance(self.content, list) else ()
        if self.role != "user" and any(isinstance(part, ShownImage) for part in shown):
            raise invalid(WITH_IMAGES)
        return self


class ReasoningItem(Part):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: ReasoningText = ""
    summary: ReasoningText = ""
    """Stands for the content if that is missing."""
    encrypted_content: Nullable[str] = ""
    """Stands for both, if this cluster made it."""


class CallItem(Part):
    """A call of an earlier response: of a function, or of what stands for one (`tools`)."""

    call_id: str
    namespace: str | None = None

    @property
    def call(self) -> ToolCall:
        raise NotImplementedError


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    name: str
    arguments: Arguments

    @property
    def call(self) -> ToolCall:
        return ToolCall.made(self.call_id, flat_name(self.name, self.namespace), self.arguments)


class CustomCallItem(CallItem):
    type: Literal["custom_tool_call"]
    name: str
    input: str

    @property
    def call(self) -> ToolCall:
        name, arguments = flat_name(self.name, self.namespace), json.dumps({INPUT: self.input})
        return ToolCall.made(self.call_id, name, arguments)


class LocalShellCallItem(CallItem):
    type: Literal["local_shell_call"]
    action: dict[str, Any]

    @property
    def call(self) -> ToolCall:
        given = {
            key: value for key, value in self.action.items() if key != "type" and value not in (None, {})
        }
        return ToolCall.made(self.call_id, "local_shell", json.dumps(given))


class ToolSearchCallItem(CallItem):
    type: Literal["tool_search_call"]
    call_id: Nullable[str] = ""
    """Empty: OpenAI searched."""
    arguments: Arguments

    @property
    def call(self) -> ToolCall:
        return ToolCall.made(self.call_id, "tool_search", self.arguments)


class CallOutputItem(Part):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: Annotated[str, Field(validation_alias=AliasChoices("call_id", "id"))]
    output: ResultContent


class ToolsItem(Part):
    """Tools that the model may call from here on. The request does not name them among its tools."""

    tools: Items[AnyTool]

    @property
    def shown(self) -> str:
        """The tools as a text for the model."""
        found, _ = functions(own(self.tools, ""), ())
        return described(*found)


class AdditionalToolsItem(ToolsItem):
    type: Literal["additional_tools"]
    role: Literal["developer", "system", "user", "assistant"] = "developer"


class ToolSearchOutputItem(ToolsItem):
    type: Literal["tool_search_output"]
    call_id: Nullable[str] = ""
    """Empty: OpenAI searched."""


AnyItem = Annotated[
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | LocalShellCallItem
    | ToolSearchCallItem
    | CallOutputItem
    | ToolSearchOutputItem
    | AdditionalToolsItem,
    ByType(default="message", what="items", hosted=HOSTED),
]
"""Members that only responses have, such as `id` and `status`, have no effect."""


def _items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise invalid("must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[Items[AnyItem], BeforeValidator(_items, json_schema_input_type=str | Items[AnyItem])]
_HISTORY = TypeAdapter(list[Input])


def chat_messages(
    instructions: str | None, items: Iterable[Part], unsealed: Callable[[str], str]
) -> list[Message]:
    """Returns the messages of the chat. `unsealed`: reads reasoning that the cluster has encrypted.

    Reasoning, a message of the assistant, and calls that follow each other become one message.
    """
    chat = [Message.made("system", instructions)] if instructions else []
    said: list[Part] = []  # by the assistant, in one message
    is_full = False  # it has a content or calls: another content begins another message
    for item in items:
        begins = isinstance(item, ReasoningItem) or (is_full and isinstance(item, MessageItem))
        if said and (begins or not _is_said(item)):
            chat.append(_message_of(said, unsealed))
            said, is_full = [], False
        if _is_said(item):
            said.append(item)
            is_full |= isinstance(item, CallItem) or (isinstance(item, MessageItem) and bool(item.content))
        else:
            chat.append(_message(item))
    return [*chat, _message_of(said, unsealed)] if said else chat


def _is_said(item: Part) -> bool:
    """Returns whether the assistant said it."""
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return isinstance(item, ReasoningItem | CallItem)


def _message_of(said: list[Part], unsealed: Callable[[str], str]) -> Message:
    content: Any = ""
    reasoning, calls = None, list[ToolCall]()
    for item in said:
        match item:
            case ReasoningItem():
                reasoning = item.content or item.summary or unsealed(item.encrypted_content)
            case MessageItem():
                content = item.content
            case CallItem():
                calls.append(item.call)
    return Message.made("assistant", content, reasoning=reasoning, calls=calls)


def _message(item: Part) -> Message:
    """Returns the message of an item that the assistant did not say."""
    match item:
        case MessageItem():
            return Message.made(item.role, item.content)
        case CallOutputItem():
            return Message.made("tool", item.output, call_id=item.call_id)
        case ToolSearchOutputItem():
            return Message.made("tool", item.shown, call_id=item.call_id)
        case AdditionalToolsItem():
            return Message.made("developer", more_tools(item.shown))
    raise AssertionError(item)


class Reasoning(Part):
    """`summary` gives no summary, because the response has the reasoning itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise invalid("a format of type json_schema, and no other, has a schema")
        return self

    @property
    def for_chat(self) -> ResponseFormat:
        return ResponseFormat(type=self.type, json_schema=None if self.schema_ is None else self)


class TextConfig(Part):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class NamedFunctionTool(Part):
    type: Literal["function", "custom"]
    name: str
    """A function of a namespace may be named without it, if no other function has the name."""

    def for_chat(self, called: dict[str, Called]) -> dict[str, Any]:
        """`called`: as `functions` returns it."""
        flat = [name for name, call in called.items() if call.name == self.name]
        name = flat[0] if self.name not in called and len(flat) == 1 else self.name
        return {"type": "function", "function": {"name": name}}


class AllowedFunctionTools(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedFunctionTool, ByType(what="tools", hosted=HOSTED)]],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]

    def for_chat(self, called: dict[str, Called]) -> dict[str, Any]:
        """`called`: as `functions` returns it."""
        tools = [tool.for_chat(called) for tool in self.tools if not isinstance(tool, Hosted)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


Choice = Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools | None


def _false(value: bool) -> bool:
    if value:
        raise unsupported("must be false")
    return value


class ResponsesStreamOptions(Part):
    # A `Literal[False]` would take 0, too.
    include_obfuscation: (
        Annotated[bool, Field(json_schema_extra={"const": False}), AfterValidator(_false)] | None
    ) = None


class ResponsesChat(ChatBody):
    """The chat completion that a body for /v1/responses asks for."""

    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }


class ResponsesBody(OpenAIBody):
    """POST /v1/responses."""

    input: Annotated[Input, Field(description="items of tools that OpenAI runs have no effect")]
    instructions: str | None = None
    previous_response_id: str | None = None
    background: Nullable[bool] = False
    store: Nullable[bool] = True
    stream_options: Annotated[
        ResponsesStreamOptions | None, Field(description="`include_obfuscation` only `false`")
    ] = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Alternatives | None = None
    include: Annotated[
        Items[str] | None, Field(description=f"only `{_LOGPROBS}` and `{_ENCRYPTED}` have an effect")
    ] = None
    reasoning: Annotated[Nullable[Reasoning], Field(description="`summary` has no effect")] = Reasoning()
    text: Nullable[TextConfig] = TextConfig()
    tools: Annotated[
        Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None,
        Field(description="tools that OpenAI runs itself have no effect"),
    ] = None
    tool_choice: Annotated[Choice, choice_of(NamedFunctionTool, AllowedFunctionTools, unsupported)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateSettings | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    safety_identifier: Annotated[str | None, Field(description="returned; no other effect")] = None
    prompt_cache_retention: Annotated[
        str | None, Field(description="no effect: prefixes are always cached")
    ] = None
    service_tier: Annotated[str | None, Field(description="no effect: there is one tier")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Field(description="no effect: a conversation longer than the context is refused"),
    ] = None

    _refuse_unsupported = refusing(RESPONSES)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid(f"top_logprobs needs include to have {_LOGPROBS}", "top_logprobs")
        if self.background and not self.store:
            raise invalid("background can only be used when `store` is true", "background")
        return self

    @property
    def seals_reasoning(self) -> bool:
        return _ENCRYPTED in (self.include or ())

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def chat(self, history: bytes, unsealed: Callable[[str], str]) -> tuple[ChatBody, dict[str, Called]]:
        """Returns the chat completion, and what calls of its functions are to the client.

        `history`: earlier inputs and outputs, as a JSON array of inputs.
        `unsealed`: reads reasoning that the cluster has encrypted.

        Raises InvalidRequest.
        """
        earlier = [item for items in (_earlier(history) if history else []) for item in items]
        places = [
            *(("previous_response_id", item) for item in earlier),
            *((f"input[{i}]", item) for i, item in enumerate(self.input)),
        ]
        items = [item for _, item in places if not isinstance(item, Hosted)]
        _check_outputs(items)
        described = ((place, item) for place, item in places if isinstance(item, ToolsItem))
        loaded = [tool for place, item in described for tool in own(item.tools, f"{place}.tools")]
        tools, called = functions(own(self.tools or (), "tools"), loaded)
        fields = {
            **self.given(OpenAIBody),
            "messages": chat_messages(self.instructions, items, unsealed),
            "max_tokens": self.max_output_tokens,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "response_format": self.text.format and self.text.format.for_chat,
            "tools": tools,
            "tool_choice": self._choice(called),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return validate(ResponsesChat, fields, ResponsesChat.names), called

    def _choice(self, called: dict[str, Called]) -> Any:
        """The `tool_choice` of the chat completion."""
        choice = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            return choice.for_chat(called)
        return choice.for_chat(called) if isinstance(choice, AllowedFunctionTools) else choice

    @property
    def repeated(self) -> bytes:
        """The fields that the response repeats, as a JSON object."""
        fields = self.model_dump(
            mode="json", include=_REPEATED, by_alias=True, exclude_none=True, warnings=False
        )
        fields["text"] = {"format": {"type": "text"}} | fields["text"]
        if self.tools:
            fields["tools"] = [tool for tool in fields["tools"] if not tool["type"].startswith(HOSTED)]
        return json.dumps(_DEFAULTS | fields).encode()


def _check_outputs(items: Iterable[Part]) -> None:
    """Raises InvalidRequest in OpenAI's words, by which clients know the error."""
    called: set[str] = set()
    for item in items:
        if isinstance(item, CallItem):
            called.add(item.call_id)
        elif isinstance(item, CallOutputItem | ToolSearchOutputItem) and item.call_id not in called:
            text = f"No tool call found for function call output with call_id {item.call_id}."
            raise InvalidRequest(text, param="input")


def _earlier(history: bytes) -> list[Any]:
    """Raises InvalidRequest: a model may call a function by a name that no function can have."""
    try:
        return _HISTORY.validate_json(history)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        text = f"the conversation has an item that cannot be an input: {reason}"
        raise InvalidRequest.at("previous_response_id", text) from None


_REPEATED = {
    "background", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "store", "text",
    "tool_choice", "tools", "top_logprobs", "user",
}  # fmt: skip
_DEFAULTS = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "tool_choice": "auto", "tools": [],
    "truncation": "disabled",
}  # fmt: skip
"""What the response has for fields that the client left out."""
