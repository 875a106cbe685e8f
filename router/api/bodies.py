"""The bodies of requests: OpenAI's fields, and vLLM's beside them.

Types are strict. Fields in `unsupported` are refused by name. Unknown fields are ignored, as in vLLM.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from router.api.fields import (
    MAX_CHOICES,
    MAX_LISTED,
    MAX_STOPS,
    Nullable,
    PromptInput,
    Prompts,
    Stop,
    Stops,
    TemplateSettings,
    TokenId,
    TruncatedLength,
    invalid,
    prompts,
    stops,
    unsupported,
)
from router.api.messages import Message
from router.api.structured import ResponseFormat, Structure, StructuredOutputs
from router.api.tools import NamedTool, Tool, ToolChoice
from router.api.unsupported import CHAT, COMPLETION, GENERATION, TOKENIZE, refuse
from router.errors import InvalidRequest, Unsupported

MAX_LOGPROBS = 20
MAX_TIMEOUT = 86_400.0  # seconds
MAX_TOOLS = 128


class Body(BaseModel):
    """The fields that all bodies have."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None


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


class GenerationBody(Body):
    """The fields that chat and text completions share."""

    stream: Nullable[bool] = False
    stream_options: StreamOptions | None = None
    n: Nullable[Annotated[int, Field(ge=1, le=MAX_CHOICES)]] = 1
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[str], PlainValidator(stops, json_schema_input_type=Stops)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LISTED)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LISTED)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LISTED)] | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Nullable[Annotated[int, Field(ge=0, lt=2**31)]] = 0
    ignore_eos: Nullable[bool] = False
    skip_special_tokens: Nullable[bool] = True
    return_token_ids: Nullable[bool] = False
    return_tokens_as_token_ids: Nullable[bool] = False
    """In logprobs, `token_id:N` in place of the text of token N."""
    include_stop_str_in_output: Nullable[bool] = False
    truncate_prompt_tokens: TruncatedLength | None = None
    """-1: as many tokens as leave room for `max_tokens`."""
    truncation_side: Literal["left", "right"] | None = None
    """Side where tokens of the prompt are dropped. None: left."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Nullable[Annotated[int, Field(ge=-(2**31), lt=2**31)]] = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Requests share cached prefixes only with those of the same API key's salt and the same `cache_salt`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return refuse(data, GENERATION)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream to be true", "stream_options")
        return self

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None:
            raise invalid("structured_outputs excludes response_format", "structured_outputs")
        if self.ignore_eos and (self.structure is not None or self.must_call):
            raise invalid("ignore_eos excludes structured output, which ends with EOS", "ignore_eos")
        return self

    @property
    def structure(self) -> Structure | None:
        """The constraint on the output, if the client set one."""
        given = self.structured_outputs or self.response_format
        return given.structure if given is not None else None

    @property
    def must_call(self) -> bool:
        """True if the output must be tool calls and nothing else."""
        return False

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of alternatives for each token. None: no logprobs at all."""
        raise NotImplementedError

    def truncated(self, prompt: list[int], context: int) -> list[int]:
        """Returns the tokens of a prompt that `truncate_prompt_tokens` keeps."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit == -1:
            limit = max(1, context - (self.max_tokens_wanted or 1))
        return prompt[:limit] if self.truncation_side == "right" else prompt[-limit:]

    @property
    def max_tokens_field(self) -> str:
        """The field that limits the output, for error messages."""
        return "max_tokens"

    @property
    def max_tokens_wanted(self) -> int | None:
        """The client's limit for output tokens."""
        return self.max_tokens


class CompletionOptions(GenerationBody):
    """The fields of a text completion without its prompt."""

    prompt_field: ClassVar[str] = "prompt"

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Nullable[bool] = False
    add_special_tokens: Nullable[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _refuse_chat_fields(cls, data: Any) -> Any:
        return refuse(data, COMPLETION)

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise unsupported("echo is not supported together with logprobs", "echo")
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs


class CompletionBody(CompletionOptions):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(prompts, json_schema_input_type=PromptInput)]


class RenderedBody(Body):
    """The fields that control how a chat template renders messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateSettings | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
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
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
        return variables | (self.chat_template_kwargs or {})

    @property
    def ends_with_generation_prompt(self) -> bool:
        """True if the rendered prompt ends with the head of the assistant's message."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given


class ChatOptions(RenderedBody, GenerationBody):
    """The fields of a chat completion without its messages."""

    prompt_field: ClassVar[str] = "messages"

    logprobs: Nullable[bool] = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Nullable[bool] = True
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_completion_fields(cls, data: Any) -> Any:
        return refuse(data, CHAT)

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise invalid(f"tools has {twice!r} twice", "tools")
        if self.must_call and not names:
            raise invalid("tool_choice needs tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            reason = f"tool_choice names {self.tool_choice.function.name!r}, which is not in tools"
            raise invalid(reason, "tool_choice")
        if self.offered_tools and self.structure is not None and self.structure.kind != "json_schema":
            reason = (
                f"{self.structure.field} is not supported together with tools, unless tool_choice is none"
            )
            raise unsupported(f"{reason}: use structured_outputs.json", self.structure.field)
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes: none if `tool_choice` is none."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def callable_tools(self) -> list[Tool]:
        """The offered tools that `tool_choice` allows to call."""
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return [tool for tool in self.offered_tools if name in (None, tool.function.name)]

    @property
    def many_calls(self) -> bool:
        """True if the output may have several tool calls."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @property
    def reasoning_budget(self) -> int | None:
        """Limit for the tokens of reasoning."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def max_tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatBody(ChatOptions):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]


class TokenizeBody(RenderedBody):
    """POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return refuse(data, TOKENIZE)

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("needs either prompt or messages", "prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId] = Field(validation_alias=AliasChoices("tokens", "token_ids"))


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes | bytearray) -> B:
    """Parses and validates JSON.

    Raises InvalidRequest with the field, the reason and the value that was sent.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explained(error) from None


def validate(kind: type[B], fields: dict[str, Any]) -> B:
    """Validates fields that are already parsed. Raises InvalidRequest like `parse`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {context['error']}")
    if not first["loc"] and "param" not in context:
        return InvalidRequest("the body must be a JSON object")
    param = context.get("param") or _path(first["loc"])
    reason = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "unsupported":
        message = reason if "param" in context else f"{param}: {reason}"
        return Unsupported(message, param=param)
    sent = "" if first["type"] in ("missing", "invalid") else f", not {_shown(first['input'])}"
    return InvalidRequest(f"{param}: {reason}{sent}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
