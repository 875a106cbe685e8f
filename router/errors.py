"""The errors of requests, with the status and the body that OpenAI's API gives them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

_LONGEST = 2000
"""Characters of a message."""


class ApiError(Exception):
    """An error for the client: an HTTP status and body, or an event if a stream has begun.

    Attributes:
        status: the HTTP status.
        type, code, param: as in OpenAI's API. `param` is the field at fault.
        retry_after: seconds after which another try may succeed.
        remedy: what to do about it, for the operator of the cluster.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    remedy = "see the log of the router: it has the stack of this error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        if len(message) > _LONGEST:  # it names what the client sent, which may be its whole body
            message = f"{message[:_LONGEST]}…"
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @classmethod
    def at(cls, field: str, reason: str) -> Self:
        """Returns the error for what is wrong with a field of the client's body."""
        return cls(f"{field}: {reason}", param=field)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


@contextmanager
def about(field: str) -> Iterator[None]:
    """Errors that are raised inside, and name no field, are about this one."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None:
            raise type(error).at(field, error.message) from None
        raise


class Unsupported(InvalidRequest):
    """A valid request for a feature that Baton does not have."""

    code = "unsupported_value"


class ContextLengthExceeded(InvalidRequest):
    """Clients that shorten a chat by themselves find the words of OpenAI's and of Anthropic's API in it."""

    code = "context_length_exceeded"

    @classmethod
    def of_prompt(cls, field: str, size: int, unit: str, most: int, context: int) -> "ContextLengthExceeded":
        """Returns the error for a prompt of `size` units, of which a prompt may have `most`."""
        text = f"prompt is too long: {size} {unit} > {most} maximum. With its output it is longer"
        text += f" than the model's context length: this model's maximum context length is {context} tokens"
        return cls.at(field, text)


class Unauthorized(ApiError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class NotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"

    @classmethod
    def of(cls, name: object, served: Sequence[str]) -> "ModelNotFound":
        """Returns the error for a name that is none of those `served`."""
        known = " or ".join(map(repr, served))
        return cls(f"there is no model {name!r} here: give {known}, or no model", param="model")


class MethodNotAllowed(ApiError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooLarge(ApiError):
    status, type, code = 413, "invalid_request_error", "body_too_large"


class UnsupportedMediaType(ApiError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Overloaded(ApiError):
    status, type, code = 429, "rate_limit_error", "overloaded"
    remedy = "add workers, or let requests wait longer (--max-wait)"


class RateLimited(Overloaded):
    """This client has reached the limits of its API key. Others are served."""

    code = "rate_limit_exceeded"
    remedy = "raise the limits of the API key, if the cluster has room"


class TooSlow(ApiError):
    """The client did not send its request in time, or did not read its response."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class Failed(ApiError):
    """The request failed on too many workers."""

    code = "request_failed"
    remedy = "look for the request id in the logs of the workers; it failed on several of them"


class NoWorker(ApiError):
    status, type, code = 503, "service_unavailable_error", "no_worker"
    remedy = "see `baton status` for why a pool has no ready worker, and start one"


class Paused(ApiError):
    """The cluster is paused, and the request has waited as long as it may."""

    status, type, code = 503, "service_unavailable_error", "paused"
    remedy = "let the cluster go on (POST /resume), or let requests wait longer (--max-wait)"


class Aborted(ApiError):
    """A pause has ended the request."""

    status, type, code = 503, "service_unavailable_error", "aborted"
    remedy = "nothing: a pause with mode=abort is meant to end requests; one with mode=keep ends none"


class ShuttingDown(ApiError):
    status, type, code = 503, "service_unavailable_error", "shutting_down"
    remedy = "nothing: clients that try again reach another router"


class TimedOut(ApiError):
    status, type, code = 504, "timeout_error", "timeout"
    remedy = "add workers, or raise --request-timeout or the client's own limit"


def error_code(kind: type[ApiError]) -> str:
    """Returns the label of this error in metrics. Clients see `code`."""
    return kind.code or "internal"


def all_errors(kind: type[ApiError] = ApiError) -> list[type[ApiError]]:
    """Returns `kind` and all its subclasses."""
    return [kind, *(error for child in kind.__subclasses__() for error in all_errors(child))]
