"""Errors in Anthropic's form."""

from typing import Any

from baton.router.errors import ApiError

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
