"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation into a chat."""

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from baton.router.api.bodies import ChatBody
from baton.router.api.fields import (
    MAX_STOPS,
    ByType,
    Items,
    Nullable,
    Part,
    ShownImage,
    ShownText,
    StopString,
    TemplateSettings,
    Text,
    invalid,
)
from baton.router.api.messages import FUNCTION_NAME, MAX_TOOLS, Arguments
from baton.router.api.sampling import Body, SamplingBody
from baton.router.api.structured import JsonSchema, ResponseFormat
from baton.router.api.validation import COUNT_TOKENS, MESSAGES, refusing, validate

NO_EFFECT = "no effect"
_TOOL_FIELDS: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],),
}  # fmt: skip


class TextBlock(Part):
    type: Literal["text"]
    text: str


class Base64Source(Part):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def address(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Part):
    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        return self.url


class ImageBlock(Part):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, ByType()]


class TextSource(Part):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    text: str = Field(alias="data")


class ContentSource(Part):
    type: Literal["content"]
    text: Text = Field(alias="content")


class DocumentBlock(Part):
    """A document of plain text."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, ByType()]
    title: str | None = None
    context: str | None = None

    _refuse_unsupported = refusing({"citations": ({"enabled": False},)}, nested=True)

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(Part):
    type: Literal["search_result"]
    source: str
    title: str
    content: Text

    _refuse_unsupported = refusing({"citations": ({"enabled": False},)}, nested=True)

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.source, self.content)))


class ToolReferenceBlock(Part):
    """The name of a tool that a search for tools has found."""

    type: Literal["tool_reference"]
    text: str = Field(alias="tool_name")


class ThinkingBlock(Part):
    """Reasoning of an earlier message. `signature` has no effect."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """Encrypted reasoning of an earlier message. The model does not see it."""

    type: Literal["redacted_thinking"]


ResultBlock = Annotated[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, ByType()]


def _blocks(value: Any) -> Any:
    """Leaves calls of tools out that Anthropic has run, and their results: the model does not have these."""
    if not isinstance(value, list):
        return [{"type": "text", "text": value}] if isinstance(value, str) else [] if value is None else value
    kinds = [str(block.get("type")) if isinstance(block, dict) else "" for block in value]
    return [
        block
        for block, kind in zip(value, kinds, strict=True)
        if kind != "server_tool_use" and not kind.endswith("_tool_result")
    ]


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Items[ResultBlock], BeforeValidator(_blocks, json_schema_input_type=str | Items[ResultBlock] | None)
    ] = Field([])
    is_error: Nullable[bool] = False

    @property
    def text(self) -> str:
        return "\n".join(block.text for block in self.content)


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    ByType(),
]


_CALLS_BY_ROLE: list[Any] = [
    {"properties": {"role": {"const": "assistant"}}},
    {"properties": {"content": {"items": {"properties": {"type": {"not": {"const": "tool_use"}}}}}}},
]


class InputMessage(Part):
    model_config = ConfigDict(json_schema_extra={"anyOf": _CALLS_BY_ROLE})

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Items[AnyBlock], BeforeValidator(_blocks, json_schema_input_type=str | Items[AnyBlock])
    ]

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.role != "assistant" and any(isinstance(block, ToolUseBlock) for block in self.content):
            raise invalid("only messages of role assistant have tool_use blocks")
        return self


def chat_messages(system: str, messages: Iterable[InputMessage]) -> list[dict[str, Any]]:
    """Returns the messages of the chat. Consecutive messages of a role become one, as at Anthropic."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": [system]}] if system else []
    for message in messages:
        for block in message.content:
            new = _message(message.role, block)
            last = chat[-1] if chat else None
            if last is not None and last["role"] == new["role"] and "tool_call_id" not in new:
                for name in new.keys() - {"role"}:
                    last.setdefault(name, []).extend(new[name])
            else:
                chat.append(new)
    for each in chat:
        for name in each.keys() & {"content", "reasoning"}:
            each[name] = _joined(each[name])
    return chat


def _joined(pieces: Iterable[str | ShownImage]) -> str | list[ShownText | ShownImage]:
    """The content of a message: a text, or texts and images in order."""
    parts: list[ShownText | ShownImage] = []
    for are_texts, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        if are_texts:
            parts.append(ShownText(text="\n".join(filter(None, map(str, group)))))
        else:
            parts += [piece for piece in group if isinstance(piece, ShownImage)]
    if all(isinstance(part, ShownText) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, ShownText))
    return parts


def _message(role: str, block: Part) -> dict[str, Any]:
    """Returns the message of one block. Its texts are lists, which grow while messages become one."""
    match block:
        case ThinkingBlock():
            return {"role": role, "content": [], "reasoning": [block.thinking]}
        case ToolUseBlock():
            function = {"name": block.name, "arguments": block.input}
            calls = [{"id": block.id, "type": "function", "function": function}]
            return {"role": role, "content": [], "tool_calls": calls}
        case ToolResultBlock():
            # A chat has no mark for a failed call.
            content = f"Error: {block.text}" if block.is_error else block.text
            return {"role": "tool", "content": [content], "tool_call_id": block.tool_use_id}
        case ImageBlock():
            return {"role": role, "content": [ShownImage(url=block.source.address)]}
        case RedactedThinkingBlock():
            return {"role": role, "content": []}
        case TextBlock() | DocumentBlock() | SearchResultBlock():
            return {"role": role, "content": [block.text]}
    raise AssertionError(block)


class AnthropicTool(Part):
    """`cache_control` and `eager_input_streaming` have no effect."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    _refuse_unsupported = refusing(_TOOL_FIELDS, nested=True, tools=(None, "custom"))

    @property
    def for_chat(self) -> dict[str, Any]:
        function = {**self.model_dump(exclude={"input_schema"}), "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Nullable[bool] = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise invalid("a choice of type tool, and no other, has a name")
        return self

    @property
    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Part):
    """`display`: "summarized" shows the whole reasoning, because there is no model that sums it up."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Part):
    user_id: str | None = None


class PromptBody(Body):
    """The fields that make the prompt."""

    messages: Annotated[
        Items[InputMessage],
        Field(min_length=1, description="only text, documents of plain text, thinking and tools"),
    ]
    system: Text = ""
    tools: Annotated[
        Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None,
        Field(description="only the client's own"),
    ] = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateSettings | None = None
    cache_control: Annotated[Any, Field(description=f"{NO_EFFECT}: prefixes are always cached")] = None

    @model_validator(mode="after")
    def _check_results(self) -> Self:
        """In Anthropic's words, by which clients know the error."""
        called: set[str] = set()
        for number, message in enumerate(self.messages):
            for block in message.content:
                if isinstance(block, ToolUseBlock):
                    called.add(block.id)
                elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                    raise invalid(
                        f"unexpected `tool_use_id` found in `tool_result` blocks: {block.tool_use_id}. "
                        "Each `tool_result` block must have a corresponding `tool_use` block before it.",
                        f"messages[{number}]",
                    )
        return self

    def chat_fields(self) -> dict[str, Any]:
        """Returns these fields as those of a chat completion."""
        messages = chat_messages(self.system, self.messages)
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        settings: dict[str, Any] = {}
        fields: dict[str, Any] = {
            "messages": messages,
            "tools": [tool.for_chat for tool in self.tools or ()],
            "reasoning_effort": config.effort,
            # A last message of the assistant is the beginning of the answer.
            "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        }
        if choice is not None:
            fields["tool_choice"] = choice.for_chat
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if config.format is not None:
            schema = JsonSchema.model_validate({"schema": config.format.schema_})
            fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        if self.thinking is not None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens
            fields["include_reasoning"] = self.thinking.display != "omitted"
            if self.thinking.type != "adaptive":
                settings["enable_thinking"] = self.thinking.type == "enabled"
        fields["chat_template_kwargs"] = settings | (self.chat_template_kwargs or {})
        return fields


class CountTokensBody(PromptBody):
    """POST /v1/messages/count_tokens."""

    _refuse_unsupported = refusing(COUNT_TOKENS)

    def chat(self) -> ChatBody:
        """Raises InvalidRequest, which names fields of a chat completion."""
        return validate(ChatBody, self.chat_fields() | {"model": self.model})


class MessagesBody(PromptBody, SamplingBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    metadata: Nullable[Metadata] = Metadata()
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Field(description=f"{NO_EFFECT}: there is one tier")
    ] = None

    _refuse_unsupported = refusing(MESSAGES)

    def chat(self) -> ChatBody:
        """Raises InvalidRequest, which names fields of a chat completion."""
        fields = {
            **self.given(SamplingBody),
            **self.chat_fields(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or [],
            "user": self.metadata.user_id,
        }
        return validate(ChatBody, fields)
