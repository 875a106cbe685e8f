"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation into a chat."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from baton.router.api.bodies import ChatBody
from baton.router.api.fields import (
    MAX_STOPS,
    ByType,
    Hosted,
    Items,
    Nullable,
    Part,
    ShownImage,
    ShownText,
    StopString,
    TemplateSettings,
    Text,
    invalid,
    readable,
)
from baton.router.api.messages import (
    FUNCTION_NAME,
    MAX_TOOLS,
    WITH_IMAGES,
    Arguments,
    Function,
    Message,
    Parameters,
    Tool,
    ToolCall,
    described,
    more_tools,
)
from baton.router.api.sampling import Body, SamplingBody
from baton.router.api.sessions import claude_session
from baton.router.api.structured import JsonSchema, ResponseFormat
from baton.router.api.validation import COUNT_TOKENS, MESSAGES, refusing, validate

NO_EFFECT = "no effect"
_TOOL_FIELDS: dict[str, tuple[Any, ...]] = {"allowed_callers": (["direct"],)}
_OF_VENDOR = "x-anthropic-billing-header"
"""How a text of the system begins that Claude Code adds for its vendor. It differs from prompt to prompt, so
no prompt would share a prefix with another. vLLM 0.32 leaves it out, too."""
_HOSTED = "web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset", "advisor"
"""How the types of tools begin that Anthropic runs itself. The model answers without them."""


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


class CompactionBlock(Part):
    """The summary of an earlier conversation. None: there is none."""

    type: Literal["compaction"]
    text: Nullable[str] = Field("", alias="content")


class ThinkingBlock(Part):
    """Reasoning of an earlier message. If it is empty, the signature may hold it."""

    type: Literal["thinking"]
    thinking: str
    signature: Nullable[str] = ""


class RedactedThinkingBlock(Part):
    """Encrypted reasoning of an earlier message. The model does not see it."""

    type: Literal["redacted_thinking"]


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, ByType()
]


_HOSTED_BLOCKS = {"server_tool_use", "mcp_tool_use", "mcp_tool_listing", "container_upload", "fallback"}


def _blocks(value: Any) -> Any:
    """Leaves calls of tools out that Anthropic has run, and their results: the model does not have these."""
    if not isinstance(value, list):
        return [{"type": "text", "text": value}] if isinstance(value, str) else [] if value is None else value
    kinds = [str(block.get("type")) if isinstance(block, dict) else "" for block in value]
    return [
        block
        for block, kind in zip(value, kinds, strict=True)
        if kind not in _HOSTED_BLOCKS and not kind.endswith("_tool_result")
    ]


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments


_READABLE: dict[str, set[str]] = {
    "text": set(), "search_result": set(), "tool_reference": set(), "image": {"base64", "url"},
    "document": {"text", "content"},
}  # fmt: skip
"""Types of blocks, and of their sources."""


def _result(value: Any) -> Any:
    return readable(_blocks(value), _sees)


def _sees(kind: str, block: dict[str, Any]) -> bool:
    source = block.get("source")
    form = source.get("type") if isinstance(source, dict) else None
    return kind in _READABLE and (not isinstance(form, str) or form in _READABLE[kind])


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Items[ResultBlock], BeforeValidator(_result, json_schema_input_type=str | Items[ResultBlock] | None)
    ] = Field([])
    is_error: Nullable[bool] = False


class NamedToolChange(Part):
    """A tool of the request. Tools of MCP servers that Anthropic calls have no effect."""

    type: Literal["tool_reference", "mcp_tool_reference", "mcp_toolset_reference"]
    name: str = ""


class DefinedTool(Part):
    type: Literal["tool_definition"]
    definition: "AnthropicTool"

    @property
    def name(self) -> str:
        return self.definition.name


class ToolAdditionBlock(Part):
    """A tool that the model may call from here on."""

    type: Literal["tool_addition"]
    tool: Annotated[NamedToolChange | DefinedTool, ByType(what="tools")]


class ToolRemovalBlock(Part):
    type: Literal["tool_removal"]
    tool: NamedToolChange


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | CompactionBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock,
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
        if self.role != "user" and any(isinstance(block, ImageBlock) for block in self.content):
            raise invalid(WITH_IMAGES)
        return self


@dataclass
class _Said:
    """What becomes one message of a chat."""

    role: str
    content: list[str | ShownImage] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def add(self, more: Self) -> None:
        self.content += more.content
        self.reasoning += more.reasoning
        self.calls += more.calls

    @property
    def message(self) -> Message:
        reasoning = "\n".join(filter(None, self.reasoning)) if self.reasoning else None
        content = _joined(self.content)
        return Message.made(self.role, content, reasoning=reasoning, calls=self.calls, call_id=self.call_id)


@dataclass
class Conversation:
    """Makes the messages of a chat from those of Anthropic's API."""

    tools: "dict[str, tuple[str, AnthropicTool]]"
    """Those of the request that the prompt does not describe, by name, with their places: their loading is
    deferred."""
    unsealed: Callable[[str], str]
    """Reads reasoning that the cluster has encrypted."""
    loaded: "dict[str, tuple[str, AnthropicTool]]" = field(default_factory=dict)
    """Tools that messages have described, with their places."""

    def chat(self, system: str, messages: Iterable[InputMessage]) -> list[Message]:
        """Returns the messages of the chat. Consecutive messages of a role become one, as at Anthropic."""
        chat = [_Said("system", [system])] if system else []
        for number, message in enumerate(messages):
            for i, block in enumerate(message.content):
                if isinstance(block, ToolAdditionBlock) and isinstance(added := block.tool, DefinedTool):
                    self.tools[added.name] = (
                        f"messages[{number}].content[{i}].tool.definition",
                        added.definition,
                    )
                new = self._said(message.role, block)
                if chat and chat[-1].role == new.role and new.call_id is None:
                    chat[-1].add(new)
                else:
                    chat.append(new)
        return [said.message for said in chat]

    def _said(self, role: str, block: Part) -> _Said:
        match block:
            case ThinkingBlock():
                return _Said(role, reasoning=[self._thought(block)])
            case ToolUseBlock():
                return _Said(role, calls=[ToolCall.made(block.id, block.name, block.input)])
            case ToolResultBlock():
                # A chat has no mark for a failed call.
                content: list[str | ShownImage] = [
                    *(["Error:"] if block.is_error else []),
                    *map(self._piece, block.content),
                ]
                if block.is_error and all(isinstance(each, str) for each in content[1:]):
                    content = ["Error: " + "\n".join(map(str, content[1:]))]
                return _Said("tool", content, call_id=block.tool_use_id)
            case RedactedThinkingBlock():
                return _Said(role)
            case _:
                return _Said(role, [self._piece(block)])

    def _thought(self, block: ThinkingBlock) -> str:
        return block.thinking or self.unsealed(block.signature)

    def _piece(self, block: Part) -> str | ShownImage:
        return ShownImage(url=block.source.address) if isinstance(block, ImageBlock) else self._text(block)

    def _text(self, block: Part) -> str:
        match block:
            case ToolReferenceBlock():
                return self._shown(block.text) or block.text
            case ToolAdditionBlock(tool=added):
                return more_tools(self._shown(added.name))
            case ToolRemovalBlock():
                return f"The tool {block.tool.name} is not available any more." if block.tool.name else ""
            case TextBlock(text=text):
                return "" if text.startswith(_OF_VENDOR) else text
            case CompactionBlock() | DocumentBlock() | SearchResultBlock():
                return block.text
        raise AssertionError(block)

    def _shown(self, name: str) -> str:
        """Returns the description of a tool whose loading was deferred. Nothing: there is none."""
        if name not in self.tools:
            return ""
        _, tool = self.loaded[name] = self.tools[name]
        return described(tool.for_chat())


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


class AnthropicTool(Part):
    """`cache_control` and `eager_input_streaming` have no effect."""

    type: Nullable[Literal["custom"]] = "custom"
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    input_schema: Parameters
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: Items[dict[str, Any]] | None = None

    _refuse_unsupported = refusing(_TOOL_FIELDS, nested=True)

    def for_chat(self, *, described: bool = False) -> Tool:
        """`described`: a message describes it, so the beginning of the prompt does not."""
        examples = {"examples": self.input_examples} if self.input_examples else {}
        function = Function.model_construct(
            name=self.name,
            description=self.description,
            parameters=self.input_schema | examples,
            strict=self.strict,
            defer_loading=described,
        )
        return Tool.model_construct(function=function)


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


def _without_vendor(value: Any) -> Any:
    if not isinstance(value, list):
        return "" if isinstance(value, str) and value.startswith(_OF_VENDOR) else value
    texts = [part.get("text") if isinstance(part, dict) else part for part in value]
    return [part for part, each in zip(value, texts, strict=True) if not str(each).startswith(_OF_VENDOR)]


class AnthropicChat(ChatBody):
    """The chat completion that a body for /v1/messages asks for."""

    names: ClassVar[Mapping[str, str]] = {
        "messages": "messages",
        "continue_final_message": "messages",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    must_keep_budget: ClassVar[bool] = False
    """Clients must send a budget with `thinking.type` enabled, and cannot know how the model reasons."""


class PromptBody(Body):
    """The fields that make the prompt."""

    messages: Annotated[
        Items[InputMessage],
        Field(min_length=1, description="only text, documents of plain text, thinking and tools"),
    ]
    system: Annotated[Text, BeforeValidator(_without_vendor)] = ""
    tools: Annotated[
        Annotated[
            list[Annotated[AnthropicTool, ByType(default="custom", what="tools", hosted=_HOSTED)]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None,
        Field(description="only the client's own; those that Anthropic runs have no effect"),
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

    @property
    def seals_reasoning(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def _options(self) -> dict[str, Any]:
        """The fields of the chat completion that do not make its prompt."""
        return {"model": self.model}

    def chat(self, unsealed: Callable[[str], str]) -> tuple[ChatBody, dict[str, str]]:
        """Returns the chat completion, and for each tool by name the field with its schema. `unsealed`: reads
        encrypted reasoning. Raises InvalidRequest."""
        placed = [(f"tools[{i}]", tool) for i, tool in enumerate(self.tools or ())]
        # Anthropic would search among the deferred tools. Here the model sees all of them.
        searched = any(
            isinstance(tool, Hosted) and tool.type.startswith("tool_search_tool") for _, tool in placed
        )
        by_name = {tool.name: (place, tool) for place, tool in placed if isinstance(tool, AnthropicTool)}
        deferred = {name: each for name, each in by_name.items() if each[1].defer_loading and not searched}
        conversation = Conversation(deferred, unsealed)
        messages = conversation.chat(self.system, self.messages)
        loaded = {name: tool.for_chat(described=True) for name, (_, tool) in conversation.loaded.items()}
        tools = {name: tool.for_chat() for name, (_, tool) in by_name.items() if name not in deferred}
        places = {
            name: f"{place}.input_schema" for name, (place, _) in (conversation.loaded | by_name).items()
        }
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        settings: dict[str, Any] = {}
        fields: dict[str, Any] = {
            **self._options(),
            "messages": messages,
            "tools": [*(loaded | tools).values()],
            "reasoning_effort": config.effort,
            # A last message of the assistant is the beginning of the answer.
            "continue_final_message": bool(messages) and messages[-1].role == "assistant",
        }
        if choice is not None:
            fields["tool_choice"] = choice.for_chat
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if config.format is not None:
            schema = JsonSchema.model_validate({"schema": config.format.schema_})
            fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        if self.thinking is not None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens
            if self.thinking.type != "adaptive":
                settings["enable_thinking"] = self.thinking.type == "enabled"
        fields["chat_template_kwargs"] = settings | (self.chat_template_kwargs or {})
        return validate(AnthropicChat, fields, AnthropicChat.names), places


class CountTokensBody(PromptBody):
    """POST /v1/messages/count_tokens."""

    _refuse_unsupported = refusing(COUNT_TOKENS)


class MessagesBody(PromptBody, SamplingBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    metadata: Nullable[Metadata] = Metadata()
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Field(description=f"{NO_EFFECT}: there is one tier")
    ] = None

    _refuse_unsupported = refusing(MESSAGES)

    def _options(self) -> dict[str, Any]:
        return {
            **self.given(SamplingBody),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or [],
            "user": claude_session(self.metadata.user_id),
        }
