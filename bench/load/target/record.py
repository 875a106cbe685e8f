"""What is kept of one request, and the names of failures."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Failure(StrEnum):
    """Why a request failed. Every failed request has exactly one; `http` has a status, too."""

    REFUSED = "refused"  # nothing listens there
    UNREACHABLE = "unreachable"  # no such host, no route, TLS
    DISCONNECTED = "disconnected"  # closed before the head of the answer
    HTTP = "http"  # an answer that is not 200
    HALF_STREAMED = "half_streamed"  # the stream ended before it was finished
    STREAM_ERROR = "stream_error"  # the server sent an error within the stream, or ended it as aborted
    GARBAGE = "garbage"  # the answer is not a stream of the OpenAI API
    EMPTY = "empty"  # finished without a single token
    TIMEOUT = "timeout"  # took longer than --timeout
    UNFINISHED = "unfinished"  # still running --drain seconds after the last was sent
    INTERRUPTED = "interrupted"  # Ctrl-C; does not count as a miss


class Record(msgspec.Struct, kw_only=True, tag=True):
    """One request. Times are seconds since the start of the run, on the client's monotonic clock.

    Attributes:
        intended: when the request was due.
        lag: how late the client was.
        sent: when the request went out. Later than `intended` + `lag` only if `--concurrency` held it back.
        arrivals: when each chunk with tokens arrived.
        tokens: how many tokens each of these chunks had; empty if the server does not count them.
        asked_input: prompt tokens; 0 for a text of unknown length.
        prompt_tokens, output_tokens, cached_tokens: as the server counted.
        skipped_turns: later turns of the session, which were not sent because this one failed.
    """

    index: int
    turn: int = 0
    session: str = ""
    client: int = 0
    intended: float
    lag: float = 0.0
    sent: float
    ended: float = 0.0
    arrivals: list[float] = []
    tokens: list[int] = []
    asked_input: int = 0
    asked_output: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    failure: Failure | None = None
    status: int = 0
    detail: str = ""
    skipped_turns: int = 0

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def error_class(self) -> str:
        """`http_429`, `refused`, …; "" for success."""
        if self.failure is None:
            return ""
        return f"http_{self.status}" if self.failure is Failure.HTTP else self.failure.value

    @property
    def generated(self) -> int:
        """Output tokens: the count of the server, or one for each chunk."""
        if self.output_tokens is not None:
            return self.output_tokens
        return sum(self.tokens) if self.tokens else len(self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.intended

    @property
    def e2e(self) -> float:
        return self.ended - self.intended

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def mean_gap(self) -> float | None:
        """Time from the first token to the last, per token after the first chunk."""
        first = self.tokens[0] if self.tokens else 1
        later = self.generated - first
        return (self.arrivals[-1] - self.arrivals[0]) / later if later > 0 else None

    def as_line(self) -> dict[str, Any]:
        """The fields and the derived latencies in ms, for the JSONL file."""
        fields = msgspec.structs.asdict(self)
        if self.ok:
            mean_gap = self.mean_gap
            fields |= {
                "ttft_ms": self.ttft * 1e3,
                "e2e_ms": self.e2e * 1e3,
                "ttit_ms": None if mean_gap is None else mean_gap * 1e3,
            }
        return fields | {"error_class": self.error_class}
