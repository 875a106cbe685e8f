"""What the router answers, as models: `/openapi.json` is made from them, and tests hold the answers to them.

Answers themselves are plain dicts (`answers`): to validate each token's would cost more than to make it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Any answer that is no success."""

    error: ErrorDetail


class PromptTokensDetails(Reply):
    cached_tokens: int


class UsageReply(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CalledFunctionReply(Reply):
    name: str
    arguments: str


class ToolCallReply(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class AssistantMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(Reply):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatReply(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Reply):
    name: str | None = None
    arguments: str


class ToolCallDelta(Reply):
    """The first one of a call has its id, type and name; `arguments` are to be joined."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AssistantDelta(Reply):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Reply):
    """One event of a stream; the last one has usage and no choice, where it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunkChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice):
    finish_reason: FinishReason  # pyrefly: ignore[bad-override]  (never assigned)


class CompletionChunk(Reply):
    """One event of a stream; the last one has usage and no choice, where it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageReply | None = None


class CompletionReply(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(Reply):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(Reply):
    prompt: str


class VersionReply(Reply):
    version: str


class WorkerReply(Reply):
    """`description` and `status` are the messages of that name in proto/worker.proto."""

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


class RouterReply(Reply):
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


class StatusReply(Reply):
    """`cluster` is what the supervisor of `baton serve` says; null without one."""

    router: RouterReply
    workers: list[WorkerReply]
    cluster: dict[str, Any] | None
