"""The lines of a batch: requests in OpenAI's batch form, and their results."""

from typing import Any

import msgspec

CONCURRENCY = 32
"""Requests of a batch at a time."""
LONGEST_PAUSE = 30.0
"""Seconds before a request is sent again that the server had no room for, whatever it asks for."""
MAX_CUSTOM_ID = 512


class RequestLine(msgspec.Struct):
    """One request. Its body is not parsed yet."""

    url: str
    body: msgspec.Raw
    custom_id: str | None = None
    method: str = "POST"


def request_of(line: bytes) -> RequestLine:
    """Parses a line. Raises ValueError that says what a line must have."""
    try:
        request = msgspec.json.decode(line, type=RequestLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"give custom_id, method, url (/v1/…) and body ({error})") from None
    if not request.url.startswith("/"):
        raise ValueError(f"give custom_id, method, url (/v1/…) and body: the url is {request.url[:80]!r}")
    if request.method != "POST":
        raise ValueError(f"method: must be POST, not {request.method[:20]!r}")
    if request.custom_id is not None and len(request.custom_id) > MAX_CUSTOM_ID:
        raise ValueError(f"custom_id: has {len(request.custom_id)} characters; at most {MAX_CUSTOM_ID}")
    if not bytes(request.body).startswith(b"{"):
        raise ValueError("body: must be an object")
    return request


def pause(retry_after: object) -> float:
    """Seconds until a request is sent again for which the server had no room."""
    text = str(retry_after)
    return min(float(text) if text.isdecimal() else 1.0, LONGEST_PAUSE)


def answered(custom_id: str | None, name: str, status: int, body: Any) -> dict[str, Any]:
    """The line for a response. `name`: the x-request-id. `body`: its JSON, or objects."""
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}


def unanswered(custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """The line for a request without a response."""
    error = {"code": code, "message": message}
    return {"id": None, "custom_id": custom_id, "response": None, "error": error}
