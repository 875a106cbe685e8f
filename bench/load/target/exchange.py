"""One request over HTTP: sends it, reads its stream into a record, and names every kind of failure."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import aiohttp

from baton.bench.load.target.answer import Answer
from baton.bench.load.target.record import Failure
from baton.bench.load.target.request import Target

_ERROR_BODY_BYTES = 4096
# Some servers close idle connections after 5 s (uvicorn). A request on a connection that closes would fail.
_KEEPALIVE_SECONDS = 3.0


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
        headers = target.headers_of(record.session)
        async with http.post(target.endpoint(record.index), data=body, headers=headers) as response:
            record.status = response.status
            if response.status != 200:
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
        refused = isinstance(e.os_error, ConnectionRefusedError)
        answer.fail(Failure.REFUSED if refused else Failure.UNREACHABLE, str(e))
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError) as e:
        # After the head the stream was cut. Before it the server had not begun to answer.
        cut = record.status == 200
        answer.fail(Failure.HALF_STREAMED if cut else Failure.DISCONNECTED, f"{type(e).__name__}: {e}")
    except (aiohttp.ClientError, ValueError, socket.gaierror) as e:  # malformed HTTP, bad redirects
        answer.fail(Failure.GARBAGE, f"{type(e).__name__}: {e}")
    answer.close(clock())
