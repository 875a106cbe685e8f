"""What the HTTP handlers know of a request: its id, its account, its headers and its body."""

import asyncio
from contextvars import ContextVar

from aiohttp import web

from baton.router import errors
from baton.router.admission.account import Account
from baton.router.admission.queue import Entry
from baton.router.api.sampling import MAX_TIMEOUT
from baton.router.config import RouterConfig
from baton.router.endpoints.http_runner import ENCODINGS, unsupported_encoding

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
ACCOUNT: ContextVar[Account] = ContextVar("account")


def authorization(request: web.Request) -> str:
    """Returns the value of the Authorization header, which Anthropic's clients send as x-api-key."""
    if (key := request.headers.get("x-api-key")) is not None and "authorization" not in request.headers:
        return f"Bearer {key}"
    return request.headers.get("authorization", "")


async def read_body(request: web.Request, config: RouterConfig, entry: Entry) -> bytearray:
    """Returns the body. Its type must be JSON, and it must arrive within the client's timeout.

    `entry` counts its bytes as they arrive, and may refuse them.
    """
    _check_type(request.headers.get("content-type"))
    if request.headers.get("content-encoding", "identity").lower() not in ENCODINGS:
        raise unsupported_encoding()
    body = bytearray()
    try:
        async with asyncio.timeout(config.client_timeout):
            async for piece in request.content.iter_any():  # `request.read` would copy it and keep it
                body += piece
                if len(body) > config.max_body_bytes:
                    raise errors.BodyTooLarge(f"the body is larger than {config.max_body_bytes} bytes")
                entry.receive(len(piece))
    except TimeoutError:
        raise errors.TooSlow(f"the body did not arrive within {config.client_timeout:g} s") from None
    except web.RequestPayloadError as error:
        encoding = request.headers.get("content-encoding", "identity")
        text = f"the body cannot be read: it is not what Content-Encoding says ({encoding[:20]})"
        raise errors.InvalidRequest(text) from error
    return body


def timeout_of(request: web.Request) -> float | None:
    """Returns the value of x-request-timeout, a header for clients that cannot add a field to the body."""
    header = request.headers.get("x-request-timeout")
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT:
        text = f"x-request-timeout: must be seconds above 0, at most {MAX_TIMEOUT:g}, not {header[:20]!r}"
        raise errors.InvalidRequest(text, param="x-request-timeout")
    return seconds


def _check_type(header: str | None) -> None:
    """Raises UnsupportedMediaType unless the body is JSON, as vLLM does.

    A browser sends a body of another type to another origin without asking for permission first.
    """
    sent = "none" if header is None else repr(header[:80])
    if header is None or header.partition(";")[0].strip().lower() != "application/json":
        text = f"the Content-Type must be application/json, not {sent}"
        raise errors.UnsupportedMediaType(f"{text}: curl needs -H 'Content-Type: application/json'")
