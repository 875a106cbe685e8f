"""One request over HTTP: path, headers and body, its stream, and a name for every failure."""

import socket
import time
from collections.abc import Callable
from typing import Any, Literal

import aiohttp
import msgspec

from baton.bench.load.target.answer import Answer, Failure

Api = Literal["completions", "chat"]
Form = Literal["text", "ids"]
"""Prompts are text, or lists of token ids."""
SessionAs = Literal["header", "user", "none"]
"""How a request names its session: `x-session-id`, the field `user`, or not at all."""
Prompt = str | list[dict[str, str]]
"""For chat a list of messages, for completions text; of token ids, numbers with commas between."""
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Dialect(msgspec.Struct, frozen=True):
    """Extensions of OpenAI's API that this server accepts. `endpoint.find_dialect` finds them.

    Attributes:
        usage: the last chunk has the token counts.
        running_usage: every chunk has the token counts so far.
        ignore_eos: answers are exactly as long as asked.
    """

    usage: bool = True
    running_usage: bool = True
    ignore_eos: bool = True

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.usage:
            running = {"continuous_usage_stats": True} if self.running_usage else {}
            fields["stream_options"] = {"include_usage": True} | running
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return fields


class Target(msgspec.Struct, frozen=True):
    """Where requests go, and what they have in common."""

    urls: tuple[str, ...]  # sessions take turns; without a slash at the end
    api: Api
    model: str
    dialect: Dialect
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    form: Form = "text"
    session_as: SessionAs = "header"

    def endpoint(self, bound: int) -> str:
        """Where requests with this number go."""
        return self.urls[bound % len(self.urls)] + PATHS[self.api]

    def body(self, prompt: Prompt, max_tokens: int, *, session: str = "", ids_back: bool = False) -> bytes:
        """`ids_back`: the answer shall have its token ids."""
        if self.form == "ids":
            assert isinstance(prompt, str), "messages have no token ids"
            written = msgspec.Raw(f"[{prompt}]".encode())
        else:
            written = prompt
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.api == "chat" else "prompt": written,
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0.0,
        }
        if ids_back:
            fields["return_token_ids"] = True
        if session and self.session_as == "user":
            fields["user"] = session
        return msgspec.json.encode(fields | self.dialect.fields() | self.extra_body)


_ERROR_BODY_BYTES = 4096
# Some servers close idle connections after 5 s (uvicorn). A request on a connection that closes would fail.
_KEEPALIVE_SECONDS = 3.0
_LONGEST_RETRY_SECONDS = 60


def new_http_session(timeout: float) -> aiohttp.ClientSession:
    """A session without a limit on connections: only the load decides how many there are."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, ttl_dns_cache=600),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 30.0)),
        headers={"accept-encoding": "identity"},  # else the run would measure compression, too
        read_bufsize=1 << 20,
    )


async def exchange(
    http: aiohttp.ClientSession,
    target: Target,
    body: bytes,
    answer: Answer,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fills `answer.record` from `sent` on. A failure is in the record. Raises only CancelledError."""
    record = answer.record
    record.sent = clock()
    try:
        headers = {"content-type": "application/json", "accept": "text/event-stream"} | target.headers
        if record.session:
            headers["x-request-id"] = record.name
        if record.session and target.session_as == "header":
            headers["x-session-id"] = record.session
        async with http.post(target.endpoint(record.bound), data=body, headers=headers) as response:
            record.status = response.status
            if response.status != 200:
                answer.retry_after = _seconds(response.headers.get("retry-after", ""))
                text = await response.content.read(_ERROR_BODY_BYTES)
                answer.fail(Failure.HTTP, f"{response.status}: {text.decode(errors='replace').strip()}")
            elif "text/event-stream" not in response.headers.get("content-type", ""):
                kind = response.headers.get("content-type", "no content type")
                answer.fail(Failure.GARBAGE, f"{kind} instead of text/event-stream")
            else:
                content = response.content
                while record.failure is None and (data := await content.readany()):
                    answer.feed(data, clock())
    except TimeoutError as e:
        answer.fail(Failure.TIMEOUT, str(e) or "timed out")
    except aiohttp.ClientConnectorError as e:
        failure = Failure.UNREACHABLE
        if isinstance(e.os_error, ConnectionRefusedError):
            failure = Failure.REFUSED
        elif isinstance(e.os_error, ConnectionError):  # the kernel accepted it for a server that then ended
            failure = Failure.DISCONNECTED
        answer.fail(failure, str(e))
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError) as e:
        # After the head the stream was cut. Before it the server had not begun to answer.
        cut = record.status == 200
        answer.fail(Failure.HALF_STREAMED if cut else Failure.DISCONNECTED, f"{type(e).__name__}: {e}")
    except (aiohttp.ClientError, ValueError, socket.gaierror) as e:  # malformed HTTP, bad redirects
        answer.fail(Failure.GARBAGE, f"{type(e).__name__}: {e}")
    answer.close(clock())


def _seconds(retry_after: str) -> float:
    """0 for a date, and for what is no number. An hour counts as a minute."""
    return float(min(int(retry_after), _LONGEST_RETRY_SECONDS)) if retry_after.isdecimal() else 0.0
