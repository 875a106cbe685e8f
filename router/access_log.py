"""The access log: one line for each request, when its answer has ended.

    request ID: POST /v1/chat/completions 200, key KEY, 12 + 20 tokens, 0 cached, length,
    queued 0.001 s, first token 0.031 s, ended 0.530 s, prefill 0 → decode 0

A request that generates nothing, or is refused, has the first part and its time. A line has no text of a
client but its id, and no API key but its name.

1. What receives a request opens `request`, which puts an `Access` into the context of its task.
2. The task fills in what it learns. `ActiveRequest` gives its record at its end.
3. When `request` closes, it writes the line.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from baton.router.errors import ApiError
from baton.router.history import Ended
from baton.system.logs import of_request

log = logging.getLogger(__name__)
CLOSED_BY_CLIENT = 499
"""The status of a request whose client did not wait for the answer, as proxies log it."""
_CURRENT: ContextVar["Access | None"] = ContextVar("access", default=None)


@dataclass(slots=True)
class Access:
    """What is known of a request so far."""

    name: str
    """The request's id as its client knows it."""
    route: str
    """Without what a client may write into it."""
    key: str = ""
    """The name of its API key. Empty: there are no keys, or it has none of them."""
    status: int = 0
    """Of HTTP, also for gRPC. 0: no answer has begun."""
    ended: Ended | None = None
    """None: it has generated nothing."""


def authorized(key: str) -> None:
    """The request of this task has the API key of this name."""
    if (access := _CURRENT.get()) is not None:
        access.key = key


def generated(record: Ended) -> None:
    """The request of this task has generated."""
    if (access := _CURRENT.get()) is not None:
        access.ended = record


@contextmanager
def request(name: str, route: str, key: str = "", *, on: bool) -> Iterator[Access]:
    """Logs the request of this task when it closes. `on`: whether it is logged."""
    access, began = Access(name, route, key), time.monotonic()
    before = _CURRENT.set(access if on else None)
    failed = 200
    try:
        yield access
    except ApiError as error:
        failed = error.status
        raise
    except (ConnectionResetError, asyncio.CancelledError):
        failed = CLOSED_BY_CLIENT
        raise
    except Exception:
        failed = 500
        raise
    finally:
        _CURRENT.reset(before)
        if on and log.isEnabledFor(logging.INFO):
            access.status = access.status or failed
            _write(access, time.monotonic() - began)


def _write(access: Access, seconds: float) -> None:
    about: dict[str, object] = {"route": access.route, "status": access.status, "seconds": round(seconds, 6)}
    parts = [f"{access.route} {access.status}"]
    if access.key:
        about["key"] = access.key
        parts.append(f"key {access.key}")
    ended = access.ended
    if ended is not None:
        about |= {
            "prompt_tokens": ended.prompt_tokens,
            "cached_tokens": ended.cached_tokens,
            "output_tokens": ended.output_tokens,
            "queue_seconds": round(ended.queue_seconds, 6),
            "first_token_seconds": round(ended.first_token_seconds, 6),
            "finish_reason": ended.finish_reason,
            "workers": tuple(ended.route),
        }
        parts += [
            f"{ended.prompt_tokens} + {ended.output_tokens} tokens",
            f"{ended.cached_tokens} cached",
            ended.finish_reason,
            f"queued {ended.queue_seconds:.3f} s",
            f"first token {ended.first_token_seconds:.3f} s",
        ]
    parts.append(f"ended {seconds:.3f} s")
    if ended is not None:
        parts += [" → ".join(ended.route)] if ended.route else []
    about |= {"name": log.name, "levelno": logging.INFO, "levelname": "INFO"}
    about["msg"] = f"request {access.name}: {', '.join(parts)}"
    # `log.info` takes twice as long: it looks for its caller, and compares each field with those of records.
    log.handle(logging.makeLogRecord(about | of_request(access.name)))
