"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation into a chat."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from baton.router.api.anthropic.content import InputMessage, Text, chat_messages
from baton.router.api.bodies import MAX_TOOLS, ChatBody
from baton.router.api.fields import (
    MAX_STOPS,
    ClosedPart,
    Items,
    Nullable,
    Part,
    StopString,
    TemplateSettings,
    few_members,
    invalid,
    unsupported,
)
from baton.router.api.messages import FUNCTION_NAME
from baton.router.api.sampling import Body, SamplingBody
from baton.router.api.structured import JsonSchema, ResponseFormat
from baton.router.api.validation import COUNT_TOKENS, MESSAGES, refuse, refusing, validate

NO_EFFECT = "no effect"
_TOOL_FIELDS: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],),
}  # fmt: skip


class AnthropicTool(Part):
    """`strict`, `cache_control` and `eager_input_streaming` have no effect."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    input_schema: dict[str, Any]
    description: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            raise unsupported(f"tools of type {kind!r} are not supported")
        return refuse(data, _TOOL_FIELDS, nested=True)

    @property
    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicToolChoice(ClosedPart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

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


class Thinking(ClosedPart):
    """`display`: "summarized" shows the whole reasoning, because there is no model that sums it up."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(ClosedPart):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ClosedPart):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(ClosedPart):
    user_id: str | None = None


class PromptBody(Body):
    """The fields that make the prompt."""

    model_config = ConfigDict(extra="forbid")

    _few_members = few_members

    messages: Annotated[
        Items[InputMessage], Field(min_length=1, description="only text, thinking and tools; no images")
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

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
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
