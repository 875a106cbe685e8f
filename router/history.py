"""What a router remembers of requests that have ended, for `/status`, the dashboard and `baton status`.

Each request adds one record when it ends, and each failure one more. The records are bounded, and no token
adds to them. Times are those of time.monotonic() until `/status` shows them.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from baton.router.errors import ApiError, error_code

REQUESTS, FAILURES, SHOWN = 256, 20, 20
"""Records that a process keeps, and ended requests that its status shows."""
EVENTS = 32
"""Events of one request. A request that is interrupted more often loses the later ones."""
WINDOW_SECONDS = 60
"""Over which the status counts requests and errors."""
LISTED_FROM = 429
"""The least HTTP status of an error that is listed. Others are mistakes of clients."""

ATTEMPT_REMEDIES = {
    "lost": "the request went on elsewhere. If it happens often, see the log of the worker",
    "engine": "see the log of the worker: its engine failed on this request",
    "kv_failed": "see `baton doctor --url URL`: KV did not reach the decode worker",
    "part_failed": "one worker computed all of the prompt. If it happens often, set "
    "--advanced.no-split-prompts",
    "mismatch": "see --batch-invariant: a worker computed another text than the one before",
}
_SEE_LOG = "see the log of the worker"


class Event(NamedTuple):
    """A change in the life of a request. `worker`: as routers and logs name it, or empty."""

    at: float
    what: str
    worker: str = ""


class Ended(NamedTuple):
    """A request that has ended. The fields up to `error` are those of its status.

    Attributes:
        id: as its client knows it.
        finish_reason: of its first choice, or `abort` or `error`.
        route: the workers that computed and decoded, in the order in which it came to them, with their
            addresses.
        key: name of the API key that asked.
    """

    id: str
    began_at: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_seconds: float
    first_token_seconds: float
    finish_reason: str
    error: str
    route: Mapping[str, str]
    events: tuple[Event, ...]
    key: str


class History:
    """Owned by one router process."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self._requests: dict[str, Ended] = {}  # by id; the last one is the newest
        self._failures: deque[dict[str, Any]] = deque(maxlen=FAILURES)
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW_SECONDS)  # second, requests, errors

    def ended(self, request: Ended) -> None:
        self._requests.pop(request.id, None)
        self._requests[request.id] = request
        if len(self._requests) > REQUESTS:
            del self._requests[next(iter(self._requests))]
        self._count(request=1)

    def failed(self, error: ApiError, request_id: str) -> None:
        """A request was answered with an error."""
        self._count(error=error.status >= LISTED_FROM)
        if error.status >= LISTED_FROM:
            self._list(request_id, error_code(type(error)), error.message, error.remedy, "")

    def attempt_failed(self, request_id: str, cause: str, worker: str, message: str) -> None:
        """An attempt failed, and the request goes on from what workers still hold of it."""
        self._list(request_id, cause, message, ATTEMPT_REMEDIES.get(cause, _SEE_LOG), worker)

    def _list(self, request_id: str, code: str, message: str, remedy: str, worker: str) -> None:
        record = {"at": unix(time.monotonic()), "request_id": request_id, "code": code}
        self._failures.append(record | {"message": message, "remedy": remedy, "worker": worker})

    def _count(self, *, request: int = 0, error: int = 0) -> None:
        second = int(time.monotonic())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += request
        self._seconds[-1][2] += error

    # ------------------------------------------------------------ what the status shows

    def status(self, key: str | None) -> dict[str, Any]:
        """Fields of the router's status. `key`: only its requests are listed. None: all are."""
        now = time.monotonic()
        recent = [each for each in self._seconds if each[0] > now - WINDOW_SECONDS]
        requests = {name: r for name, r in self._requests.items() if key in (None, r.key)}
        failures = [f for f in self._failures if key is None or f["request_id"] in requests]
        return {
            "uptime_seconds": round(now - self.started_at, 1),
            "last_minute": {
                "requests": sum(each[1] for each in recent),
                "errors": sum(each[2] for each in recent),
            },
            "failures": failures,
            "recent_requests": [_summary(each) for each in list(requests.values())[-SHOWN:]],
        }

    def find(self, request_id: str, key: str | None) -> Ended | None:
        """`key`: as in `status`."""
        found = self._requests.get(request_id)
        return found if found is not None and key in (None, found.key) else None


def merged(routers: list[dict[str, Any]]) -> dict[str, Any]:
    """The same fields of several processes."""
    return {
        "uptime_seconds": max((each["uptime_seconds"] for each in routers), default=0.0),
        "last_minute": {
            name: sum(each["last_minute"][name] for each in routers) for name in ("requests", "errors")
        },
        "failures": _newest(routers, "failures", "at", FAILURES),
        "recent_requests": _newest(routers, "recent_requests", "began", SHOWN),
    }


def _newest(routers: list[dict[str, Any]], field: str, time_field: str, most: int) -> list[dict[str, Any]]:
    records = [record for each in routers for record in each[field]]
    return sorted(records, key=lambda record: record[time_field])[-most:]


def _summary(request: Ended) -> dict[str, Any]:
    fields = {name: getattr(request, name) for name in Ended._fields[:10] if name != "began_at"}
    return {**fields, "began": unix(request.began_at), "route": list(request.route)}


def timeline(request: Ended, phases: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The life of a request: what the router did, and the phases that its workers report, by worker."""
    events = [
        {"seconds": round(each.at - request.began_at, 6), "what": each.what, "worker": each.worker}
        for each in request.events
    ]
    return {**_summary(request), "events": events, "phases": dict(phases)}


def unix(at: float) -> float:
    """Converts a time.monotonic() to Unix time, to the millisecond."""
    return round(time.time() - time.monotonic() + at, 3)  # noqa: TID251 - a timestamp
