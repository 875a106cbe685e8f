"""What is kept of one request, and how a failed one is called."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Failure(StrEnum):
    """Why a request failed. Every failed request has exactly one; `http` also has a status."""

    REFUSED = "refused"  # nothing listens there
    UNREACHABLE = "unreachable"  # no such host, no route, TLS
    DISCONNECTED = "disconnected"  # closed before the answer's head
    HTTP = "http"  # an answer that is not 200
    HALF_STREAMED = "half_streamed"  # the stream ended before it was finished
    STREAM_ERROR = "stream_error"  # the server sent an error within the stream, or ended it as aborted
    GARBAGE = "garbage"  # what came is no stream of OpenAI's
    EMPTY = "empty"  # finished without a single token
    TIMEOUT = "timeout"  # took longer than --timeout
    UNFINISHED = "unfinished"  # still running --drain seconds after the last was sent
    INTERRUPTED = "interrupted"  # Ctrl-C; no fault of the server's and no miss


class Record(msgspec.Struct, kw_only=True):
    """One request. Times are seconds since the start of the run, on the client's monotonic clock.

    `intended` is when the request was due, `lag` how late the client itself was, `sent` when it really went
    out (later than `intended` + `lag` only while `--concurrency` held it back). `arrivals` has the arrival of
    every chunk that carried tokens, `tokens` how many each carried; without per-chunk counts by the server,
    `tokens` is empty.
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
    asked_input: int = 0  # 0: a text of unknown length
    asked_output: int = 0
    prompt_tokens: int | None = None  # these three as the server counted
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    failure: Failure | None = None
    status: int = 0
    detail: str = ""
    skipped_turns: int = 0  # of the same session, never sent because this one failed

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
        """Output tokens: the server's count, or else one for each chunk."""
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
        """Between chunks, as they came."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def mean_gap(self) -> float | None:
        """Token-normalised: from the first token to the last, per token after the first chunk's."""
        first = self.tokens[0] if self.tokens else 1
        later = self.generated - first
        return (self.arrivals[-1] - self.arrivals[0]) / later if later > 0 else None

    def as_line(self) -> dict[str, Any]:
        """For the JSONL file: with the derived latencies in ms."""
        fields = msgspec.to_builtins(self)
        if self.ok:
            mean_gap = self.mean_gap
            fields |= {
                "ttft_ms": self.ttft * 1e3,
                "e2e_ms": self.e2e * 1e3,
                "ttit_ms": None if mean_gap is None else mean_gap * 1e3,
            }
        return fields | {"error_class": self.error_class}
