"""The bodies of requests: OpenAI's fields, and vLLM's beside them.

The message of a gRPC call becomes one of them. Types are strict. Fields in a list of `validation` are
refused by name. Unknown fields are ignored, as in vLLM.
"""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from google.protobuf.message import DecodeError
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel, model_validator

from baton.engine.api.sampling_params import MAX_NAMED
from baton.router.api.earlier import ChatReasoning, FunctionCall, with_effort, with_tools
from baton.router.api.fields import (
    MAX_CHOICES,
    Items,
    Nullable,
    Prompts,
    TemplateSettings,
    TokenId,
    invalid,
    unsupported,
    within,
)
from baton.router.api.messages import (
    MAX_TOOLS,
    AllowedToolsChoice,
    Function,
    Message,
    NamedTool,
    Tool,
    ToolChoice,
)
from baton.router.api.sampling import Body, OpenAIBody
from baton.router.api.structured import ResponseFormat, Structure
from baton.router.api.validation import CHAT, COMPLETION, GENERATION, TOKENIZE, refusing, validate
from baton.router.errors import InvalidRequest
from baton.rpc import inference_pb2 as pb

Alternatives = Annotated[int, within("logprobs")]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    """None: as `continuous_usage_stats`."""
    continuous_usage_stats: Nullable[bool] = False
    """vLLM's: usage in each chunk."""

    @property
    def usage_at_the_end(self) -> bool:
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage

    @property
    def usage_in_each_chunk(self) -> bool:
        return self.usage_at_the_end and self.continuous_usage_stats


_STREAMED: list[Any] = [
    {"properties": {"stream_options": {"type": "null"}}},
    {"properties": {"stream": {"const": True}}, "required": ["stream"]},
]


class GenerationBody(OpenAIBody):
    """The fields that chat and text completions share."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _STREAMED})

    stream_options: StreamOptions | None = None
    n: Nullable[Annotated[int, Field(ge=1, le=MAX_CHOICES)]] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: Nullable[bool] = False
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_NAMED)] | None = None
    """With logprobs: the alternatives to return, in place of the most likely ones."""
    return_tokens_as_token_ids: Nullable[bool] = False
    """In logprobs, `token_id:N` in place of the text of token N."""
    prompt_logprobs: Alternatives | None = None
    """How many alternatives to show with the log probability of each token of the prompt."""
    response_format: ResponseFormat | None = None

    _refuse_unsupported = refusing(GENERATION)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs is not supported together with stream", "prompt_logprobs")
        named = self.logprob_token_ids
        if named and self.logprobs_wanted is None:
            raise invalid("logprob_token_ids needs logprobs", "logprob_token_ids")
        if named and len(set(named)) < len(named):
            raise invalid("logprob_token_ids must have each token once", "logprob_token_ids")
        if self.structured_outputs is not None and self.response_format is not None:
            reason = f"structured_outputs excludes {self.named('response_format')}"
            raise invalid(reason, "structured_outputs")
        if self.ignore_eos and (self.structure is not None or self.must_call):
            raise invalid("ignore_eos excludes structured output, which ends with EOS", "ignore_eos")
        return self

    @property
    def structure(self) -> Structure | None:
        """The constraint on the output, if the client set one."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure
        if self.response_format is None:
            return None
        return self.response_format.structure(self.names.get("response_format"))

    @property
    def must_call(self) -> bool:
        """True if the output must be tool calls and nothing else."""
        return False

    @property
    def reasoning_budget(self) -> int | None:
        """Limit for the tokens of reasoning."""
        return None

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of alternatives for each token. None: no logprobs at all."""
        raise NotImplementedError

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """Number of alternatives for each token of the prompt. None: no logprobs of the prompt."""
        return self.prompt_logprobs

    def truncated(self, prompt: list[int], context: int) -> list[int]:
        """Returns the tokens of a prompt that `truncate_prompt_tokens` keeps."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit == -1:
            limit = context - 1
        return prompt[:limit] if self.truncation_side == "right" else prompt[-limit:]

    @property
    def max_tokens_wanted(self) -> int | None:
        """The client's limit for output tokens."""
        return self.max_tokens

    @property
    def usage_at_the_end(self) -> bool:
        return self.stream_options is not None and self.stream_options.usage_at_the_end

    @property
    def usage_in_each_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.usage_in_each_chunk

    def without_prompt(self) -> Self:
        """Returns what is read of the body after its preparation."""
        fields = type(self).model_fields
        return self.model_copy(update={name: made for name, made in _PREPARED.items() if name in fields})


_PREPARED: dict[str, Any] = {
    "messages": [], "prompt": [], "bad_words": None, "chat_template_kwargs": None, "response_format": None,
    "structured_outputs": None,
}  # fmt: skip
"""Fields of which the preparation makes something else. They may be large."""


class CompletionOptions(GenerationBody):
    """The fields of a text completion without its prompt."""

    prompt_field: ClassVar[str] = "prompt"

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0, with `echo` or `prompt_logprobs`: only the prompt."""
    logprobs: Alternatives | None = None
    echo: Nullable[bool] = False
    add_special_tokens: Nullable[bool] = True

    _refuse_chat_fields = refusing(COMPLETION)

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid("must be at least 1, not 0, unless echo or prompt_logprobs is set", "max_tokens")
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)


class CompletionBody(CompletionOptions):
    """POST /v1/completions."""

    prompt: Prompts


class RenderedBody(Body):
    """The fields that control how a chat template renders messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: TemplateSettings | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Field(description="a variable of the chat template")
    ] = None
    add_generation_prompt: bool | None = None
    """None: true, unless `continue_final_message` is true."""
    continue_final_message: Nullable[bool] = False
    add_special_tokens: bool | None = None
    """None: true for a prompt, false for messages, because chat templates write these tokens themselves."""

    @model_validator(mode="after")
    def _check_end_of_prompt(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise invalid("continue_final_message excludes add_generation_prompt", "continue_final_message")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes."""
        return self.tools or []

    @property
    def template_settings(self) -> dict[str, Any]:
        """Variables of the template. As in vLLM, the reasoning effort also sets `enable_thinking`."""
        effort = self.reasoning_effort
        variables: dict[str, Any] = {"verbosity": self.verbosity} if self.verbosity else {}
        if effort:
            variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return variables | (self.chat_template_kwargs or {})

    @property
    def ends_with_generation_prompt(self) -> bool:
        """True if the rendered prompt ends with the head of the assistant's message."""
        adds_head = self.add_generation_prompt
        return not self.continue_final_message if adds_head is None else adds_head


class ChatOptions(RenderedBody, GenerationBody):
    """The fields of a chat completion without its messages."""

    @property
    def prompt_field(self) -> str:
        return self.named("messages")

    logprobs: Nullable[bool] = False
    top_logprobs: Alternatives | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """OpenAI's earlier form of `tools`."""
    function_call: FunctionCall | None = None
    """That of `tool_choice`."""
    reasoning: ChatReasoning | None = None
    include_reasoning: Nullable[bool] = True
    separate_reasoning: Nullable[bool] = True
    """False: the content has the whole output, with the reasoning and its marks."""
    stream_reasoning: Nullable[bool] = True
    """False: a stream has the reasoning in one piece, before the answer."""
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1: no limit."""

    _refuse_completion_fields = refusing(CHAT)
    _take_functions = model_validator(mode="before")(classmethod(with_tools))
    _take_effort = model_validator(mode="before")(classmethod(with_effort))

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        names = Counter(tool.function.name for tool in self.tools or ())
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            field = "functions" if self.functions is not None else "tools"
            raise invalid(f"{field} has {twice!r} twice", field)
        if self.must_call and not names:
            raise invalid("tool_choice needs tools", "tool_choice")
        choice = self.tool_choice
        chosen = {choice.function.name} if isinstance(choice, NamedTool) else set()
        chosen |= choice.names if isinstance(choice, AllowedToolsChoice) else set()
        if not chosen <= names.keys():
            reason = f"no such tool: Tool {min(chosen.difference(names))!r} not found in tools list"
            raise invalid(reason, "tool_choice")
        if self.offered_tools and self.structure is not None and self.structure.kind != "json_schema":
            reason = (
                f"{self.structure.field} is not supported together with tools, unless tool_choice is none"
            )
            raise unsupported(f"{reason}: use structured_outputs.json", self.structure.field)
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes: none if `tool_choice` is none, or those that it allows."""
        choice, tools = self.tool_choice, self.tools or []
        if isinstance(choice, AllowedToolsChoice):
            return [tool for tool in tools if tool.function.name in choice.names]
        return [] if choice == "none" else tools

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else choice
        return mode not in (None, "none", "auto")

    @property
    def callable_tools(self) -> list[Tool]:
        """The offered tools that `tool_choice` allows to call."""
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return [tool for tool in self.offered_tools if name in (None, tool.function.name)]

    @property
    def many_calls(self) -> bool:
        """True if the output may have several tool calls."""
        return self.parallel_tool_calls is not False and not self.names_tool

    @property
    def names_tool(self) -> bool:
        """True if `tool_choice` names the tool to call."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def calls_functions(self) -> bool:
        """True if a call comes back as `function_call`."""
        return self.functions is not None and self.function_call is not None

    @property
    def reasoning_budget(self) -> int | None:
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


if TYPE_CHECKING:
    Options = ChatOptions | CompletionOptions
else:  # as msgspec reads it
    Options = GenerationBody


class ChatBody(ChatOptions):
    """POST /v1/chat/completions."""

    must_keep_budget: ClassVar[bool] = True
    """False: a budget of reasoning has no effect for a model whose reasoning cannot be limited."""

    messages: Annotated[Items[Message], Field(min_length=1)]


_PROMPT_OR_MESSAGES: list[Any] = [
    {"properties": {given: {"not": {"type": "null"}}, other: {"type": "null"}}, "required": [given]}
    for given, other in (("prompt", "messages"), ("messages", "prompt"))
]


class TokenizeBody(RenderedBody):
    """POST /tokenize: a prompt or messages."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _PROMPT_OR_MESSAGES})

    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    return_token_strs: Nullable[bool] = False

    _refuse_unsupported = refusing(TOKENIZE)

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("needs either prompt or messages", "prompt")
        return self


_CHAT_OR_COMPLETION: list[Any] = [
    {"$ref": "#/components/schemas/ChatBody"},
    {"allOf": [{"$ref": "#/components/schemas/CompletionBody"}, {"not": {"required": ["messages"]}}]},
]


class InvocationBody(RootModel[ChatBody | CompletionBody]):
    """POST /invocations: a chat if it has messages."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _CHAT_OR_COMPLETION})


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId] = Field(validation_alias=AliasChoices("tokens", "token_ids"), fail_fast=True)
    skip_special_tokens: Nullable[bool] = False
    """False as in vLLM; SGLang's default is true."""


Short = Annotated[str, Field(max_length=512)]


class ExpiresAfter(BaseModel):
    """When a file expires."""

    model_config = ConfigDict(strict=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 24 * 3600)]


class FileForm(BaseModel):
    """The form of POST /v1/files, without the file."""

    model_config = ConfigDict(strict=True)

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None
    """The fields `expires_after[anchor]` and `expires_after[seconds]`."""


class BatchBody(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(strict=True)

    input_file_id: Short
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Short, Short], Field(max_length=16, fail_fast=True)] | None = None
    output_expires_after: ExpiresAfter | None = None
    """Of the files with the results, from the end of the batch on."""


def parse_message(raw: bytes) -> ChatBody | CompletionBody:
    """Turns the message of a gRPC call into a body. Raises InvalidRequest.

    Validates the fields that are set, under their JSON names."""
    try:
        request = pb.GenerateRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequest("the message is not a baton.v1.GenerateRequest") from None
    fields: dict[str, Any] = {field.name: value for field, value in request.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = list(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    if "structured_outputs" in fields:
        constraint = {field.name: value for field, value in fields["structured_outputs"].ListFields()}
        if "choice" in constraint:
            constraint["choice"] = list(constraint["choice"].texts)
        fields["structured_outputs"] = constraint
    if "chat" in fields:
        messages = fields.pop("chat").messages
        fields["messages"] = [{each.name: value for each, value in m.ListFields()} for m in messages]
        if "logprobs" in fields:
            fields["top_logprobs"], fields["logprobs"] = fields["logprobs"], True
        return validate(ChatBody, fields)
    if "token_ids" in fields:
        fields["prompt"] = list(fields.pop("token_ids").ids)
    elif "text" in fields:
        fields["prompt"] = fields.pop("text")
    return validate(CompletionBody, fields)
