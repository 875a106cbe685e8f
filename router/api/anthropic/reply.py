"""The JSON of /v1/messages, as models for `/openapi.json` and for tests."""

from typing import Any, Literal

from baton.router.api.responses import ResponseModel
from baton.router.errors import ApiError


class AnthropicMessage(ResponseModel):
    """The blocks of its content, and its usage, are those of Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: (
        Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] | None
    )
    stop_sequence: str | None
    usage: dict[str, Any]


class AnthropicErrorDetail(ResponseModel):
    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorResponse(ResponseModel):
    """The body of every response that is not a success, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


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
