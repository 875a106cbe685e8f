"""The JSON of /v1/messages, as models for `/openapi.json` and for tests."""

from typing import Any, Literal

from pydantic import RootModel

from baton.router.api.responses import ResponseModel, one_of
from baton.router.errors import ApiError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputThinking(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class OutputText(ResponseModel):
    type: Literal["text"]
    text: str


class OutputToolUse(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = OutputThinking | OutputText | OutputToolUse


class ThinkingTokens(ResponseModel):
    thinking_tokens: int


class MessageUsage(ResponseModel):
    input_tokens: int
    """Without those that were found in a prefix cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class AnthropicMessage(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    input_tokens: int


class AnthropicErrorDetail(ResponseModel):
    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorResponse(ResponseModel):
    """The body of every response that is not a success, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class MessageEnd(ResponseModel):
    stop_reason: StopReason
    stop_sequence: str | None


_Delta = one_of(
    {
        "ThinkingDelta": {"type": Literal["thinking_delta"], "thinking": str},
        "TextDelta": {"type": Literal["text_delta"], "text": str},
        "InputJsonDelta": {"type": Literal["input_json_delta"], "partial_json": str},
    }
)
_Event = one_of(
    {
        "MessageStart": {"type": Literal["message_start"], "message": AnthropicMessage},
        "BlockStart": {"type": Literal["content_block_start"], "index": int, "content_block": OutputBlock},
        "BlockDelta": {"type": Literal["content_block_delta"], "index": int, "delta": _Delta},
        "BlockStop": {"type": Literal["content_block_stop"], "index": int},
        "MessageDelta": {"type": Literal["message_delta"], "delta": MessageEnd, "usage": MessageUsage},
        "MessageStop": {"type": Literal["message_stop"]},
    }
)


class MessageEvent(RootModel[_Event | AnthropicErrorResponse]):
    """One event of a stream. There is no [DONE] at the end."""


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the JSON body, which is also that of an event in a stream."""
    described: dict[str, Any] = {"type": _TYPES.get(error.status, "api_error"), "message": error.message}
    if error.param == "thread":  # the client then sends the conversation with each request
        described["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": described, "request_id": request_id}
