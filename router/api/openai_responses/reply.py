"""The JSON of /v1/responses, as models for `/openapi.json` and for tests."""

from typing import Any, Literal

from pydantic import RootModel

from baton.router.api.responses import ResponseModel, TokenLogprob, one_of

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[TokenLogprob]


class ReasoningPart(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ResponseModel):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputTextPart]


class OutputReasoning(ResponseModel):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    """Always empty."""
    content: list[ReasoningPart]


class OutputFunctionCall(ResponseModel):
    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(ResponseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponsesUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class FailureDetails(ResponseModel):
    code: Literal["server_error"]
    message: str


class ResponseObject(ResponseModel):
    """A response. It repeats fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputItem]
    error: FailureDetails | None
    incomplete_details: IncompleteDetails | None
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


class InputItems(ResponseModel):
    """The items that the model got, with those of earlier responses."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


_NUMBER = {"sequence_number": int}
"""Counts the events of a stream from 0."""
_ITEM: dict[str, Any] = _NUMBER | {"item_id": str, "output_index": int}
_PART = _ITEM | {"content_index": int}
_LOGPROBS = (list[TokenLogprob] | None, None)
_LIFECYCLE = Literal[
    "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
]  # fmt: skip
_Event = one_of(
    {
        "LifecycleEvent": _NUMBER | {"type": _LIFECYCLE, "response": ResponseObject},
        "ItemEvent": _NUMBER
        | {
            "type": Literal["response.output_item.added", "response.output_item.done"],
            "output_index": int,
            "item": OutputItem,
        },
        "PartEvent": _PART
        | {
            "type": Literal["response.content_part.added", "response.content_part.done"],
            "part": OutputTextPart | ReasoningPart,
        },
        "TextDeltaEvent": _PART
        | {
            "type": Literal["response.output_text.delta", "response.reasoning_text.delta"],
            "delta": str,
            "logprobs": _LOGPROBS,
        },
        "TextDoneEvent": _PART
        | {
            "type": Literal["response.output_text.done", "response.reasoning_text.done"],
            "text": str,
            "logprobs": _LOGPROBS,
        },
        "ArgumentsDeltaEvent": _ITEM
        | {"type": Literal["response.function_call_arguments.delta"], "delta": str},
        "ArgumentsDoneEvent": _ITEM
        | {"type": Literal["response.function_call_arguments.done"], "name": str, "arguments": str},
    }
)


class ResponseEvent(RootModel[_Event]):
    """One event of a stream. There is no [DONE] at the end."""
