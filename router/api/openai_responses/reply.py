"""The JSON of /v1/responses, as models for `/openapi.json` and for tests."""

from typing import Any, Literal

from baton.router.api.responses import ResponseModel, TokenLogprob

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


class ResponsesUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(ResponseModel):
    """A response. It repeats fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputItem]
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
