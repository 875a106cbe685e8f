"""The JSON of responses, as models for `/openapi.json` and for tests.

The router itself builds responses as plain dicts (`router.endpoints.builders`), because a model for
each token would cost more than the rest of its response.
"""

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def one_of(models: dict[str, dict[str, Any]]) -> Any:
    """Makes a model of each of these names with these members. Returns their union."""
    made = [create_model(name, __base__=ResponseModel, **members) for name, members in models.items()]
    return reduce(or_, made)


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: int | None = None
    """Only of chats with a model that reasons."""
    accepted_prediction_tokens: int | None = None
    """Drafts of workers that became tokens. This and the next one are only there if there were drafts."""
    rejected_prediction_tokens: int | None = None
    """Drafts that became none."""


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    numerics_changed: Literal[True] | None = None
    """Only with workers of `--batch-invariant`: the request went on without a worker that computes the same
    bits as its first one."""


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


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


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | None = None


class Timing(ResponseModel):
    """How long a request with one choice took, with --enable-per-request-metrics."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    tokens_per_second: float
    mean_itl_ms: float | None = None
    """Of two tokens or more."""


class Completion(ResponseModel):
    """What chats and completions share, whole ones and the events of a stream."""

    id: str
    created: int
    model: str
    metrics: Timing | None = None
    """Of a stream the event with the usage has it."""


class ChatResponse(Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None


class FunctionDelta(ResponseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """A part of a tool call.

    The first part has id, type and name. Clients join the `arguments` of all parts.
    """

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AssistantDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Completion):
    """One event of a stream. If usage was asked for, the last event has it, and no choice."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunkChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice):
    prompt_logprobs: PromptLogprobs | None
    finish_reason: FinishReason  # pyrefly: ignore[bad-override]  (fields are never assigned)


class CompletionChunk(Completion):
    """One event of a stream. If usage was asked for, the last event has it, and no choice."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


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
    parent: None
    max_model_len: int
    default_sampling_params: dict[str, float]
    """Fields that a request gets if it leaves them out."""


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None
    """The tokens as the vocabulary spells them, with `return_token_strs`."""


class DetokenizeResponse(ResponseModel):
    prompt: str


class TokenizerInfoResponse(ResponseModel):
    """The names are those of tokenizer_config.json. Without a chat template the first three are null."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    tokenizer_class: str
    """The class of transformers that loads such a tokenizer."""
    vocab_size: int
    model_max_length: int


class LoadResponse(ResponseModel):
    server_load: int
    """Requests that this router process generates for."""


class ServerInfoResponse(ResponseModel):
    version: str
    model: str
    max_model_len: int
    tool_call_parser: str | None
    reasoning_parser: str | None
    default_sampling_params: dict[str, float]


class VersionResponse(ResponseModel):
    version: str


class StatusWorker(ResponseModel):
    """A worker. `description` and `status` are WorkerDescription and WorkerStatus of proto/worker.proto."""

    address: str
    role: Literal["prefill", "decode", "unknown"]
    index: int
    incarnation: str
    state: str
    reason: str
    remedy: str
    attempts: int
    description: dict[str, Any]
    status: dict[str, Any]


class StatusRouter(ResponseModel):
    index: int
    pid: int
    model: str
    state: Literal["serving", "draining"]
    ready: bool
    requests: int
    waiting_for_turn: int
    waiting_for_room: int
    waiting_for_workers: int
    waiting_tokens: int


class StatusResponse(ResponseModel):
    """`cluster` is the report of the supervisor of `baton serve`; null without one."""

    router: StatusRouter
    workers: list[StatusWorker]
    cluster: dict[str, Any] | None
