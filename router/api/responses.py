"""The JSON of the main responses, as models for `/openapi.json` and for tests.

The router itself builds responses as plain dicts (`router.endpoints.builders`), because a model for
each token would cost more than the rest of its response. The events of streams have no model: they are
those of the OpenAI and Anthropic APIs, and tests read them with the types of these clients.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class MultimodalTokens(ResponseModel):
    image: int


class PromptTokensDetails(ResponseModel):
    cached_tokens: int
    multimodal_tokens: MultimodalTokens | None = None
    """Tokens of the prompt that stand for images, as vLLM reports them. Only if there are some."""


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: int | None = None
    """Only of chats with a model that reasons."""
    accepted_prediction_tokens: int | None = None
    """Drafts of workers that became tokens. This and the next one are only there if there were drafts."""
    rejected_prediction_tokens: int | None = None
    """Drafts that became none."""


class WeightsVersion(ResponseModel):
    """Versions of the weights that computed the first and the last token. null: the weights of `--model`."""

    first: str | None
    last: str | None


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    numerics_changed: Literal[True] | None = None
    """Only with workers of `--batch-invariant`: the request went on without a worker that computes the same
    bits as its first one."""
    weights_version: WeightsVersion | None = None
    """Only if `baton weights` replaced the weights that computed the answer, or some of it."""


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprob]


class CompletionLogprobs(ResponseModel):
    """With `echo`, the first token of the prompt has no logprob and no alternatives."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseModel):
    logprob: float
    rank: Annotated[int, Field(ge=1)]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each token of the prompt: it and its alternatives, by their ids. None: the first token."""


class OutputFunction(ResponseModel):
    name: str
    arguments: str


class OutputToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: OutputFunction


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    """What the model wrote before its answer."""
    reasoning_content: str | None = None
    """The same, by the name that DeepSeek and SGLang use."""
    tool_calls: list[OutputToolCall] | None = None
    function_call: OutputFunction | None = None
    """The call, if the request has `functions`."""


class Choice(ResponseModel):
    """What choices of chats and completions share."""

    index: int
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | None = None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class Timing(ResponseModel):
    """How long a request with one choice took, with --advanced.enable-per-request-metrics."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    tokens_per_second: float
    mean_itl_ms: float | None = None
    """Of two tokens or more."""


class Completion(ResponseModel):
    """What chats and completions share."""

    id: str
    created: int
    model: str
    metrics: Timing | None = None


class ChatResponse(Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None


class CompletionResponse(Completion):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The model, or the path of an adapter."""
    parent: str | None
    """The model of an adapter."""
    max_model_len: int
    default_sampling_params: dict[str, float]
    """Fields that a request gets if it leaves them out."""


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class ResponsesUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    weights_version: WeightsVersion | None = None
    """As of a chat."""


class ResponseObject(ResponseModel):
    """The JSON of /v1/responses, whose items are those of OpenAI's API. It repeats fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    usage: ResponsesUsage | None
    """Of a complete or incomplete response."""
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    tool_choice: Any
    tools: list[Any]
    truncation: Literal["disabled"]
    background: bool
    store: bool
    reasoning: dict[str, str]
    text: dict[str, Any]
    service_tier: Literal["default"]
    temperature: float
    top_p: float
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
