"""Reads one streamed answer into a record. Pure: its input is bytes and the times at which they arrived."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from baton.bench.load.target.sse import SSEError, SSEParser
from baton.system.words import counted

# Finish reasons of requests that the server gave up: "abort" is vLLM's.
_ABORTED = {"abort", "error", "cancelled"}
_SHOWN = 200
_TOO_MANY = 429


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Answer:
    """Fills a record. Life: `feed` until `finished`, then `close`; or `fail` at any time.

    A chunk counts as tokens if the server's running count rose with it. If the server sends no running count,
    a chunk counts if it carries text. So the role chunk before the first token and the finish reason after
    the last do not count, and a token of half a character does.
    """

    def __init__(self, record: Record, *, keep: bool = False) -> None:
        """`keep`: the text and the token ids, for the next prompt."""
        self.record = record
        self.token_ids: list[int] = []
        self.retry_after = 0.0  # seconds after which a server that refused wants to be asked again
        self._keep = keep
        self._texts: list[str] = []
        self.finished = False
        self._sse = SSEParser()
        self._done = False
        self._counted = 0

    @property
    def text(self) -> str:
        """The text without reasoning."""
        return "".join(self._texts)

    def feed(self, data: bytes, now: float) -> None:
        """`now`: when `data` arrived. Ignores everything after a failure."""
        try:
            for event in self._sse.feed(data):
                if self.record.failure is not None:
                    return
                self._event(event, now)
        except SSEError as e:
            self.fail(Failure.GARBAGE, str(e))

    def close(self, now: float) -> None:
        """The stream has ended. Without a finish reason it was cut off."""
        record = self.record
        record.ended = record.arrivals[-1] if self.finished and record.arrivals else now
        if record.failure is not None:
            return
        if not self.finished:
            kind = "[DONE] without a finish reason" if self._done else "the stream ended"
            self.fail(Failure.HALF_STREAMED, f"{kind} after {counted(len(record.arrivals), 'chunk')}")
        elif not record.arrivals:
            self.fail(Failure.EMPTY, f"finished ({record.finish_reason}) without a token")

    def fail(self, failure: Failure, detail: str) -> None:
        if self.record.failure is None:
            self.record.failure, self.record.detail = failure, detail[:_SHOWN]

    def _event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _DECODER.decode(event)
        except msgspec.DecodeError as e:  # a ValidationError is one
            self.fail(Failure.GARBAGE, f"{e}: {event[:80]!r}")
            return
        if chunk.error is not None:
            self.fail(Failure.STREAM_ERROR, _message(chunk.error))
            return
        if chunk.choices is None and chunk.usage is None:
            self.fail(Failure.GARBAGE, f"neither choices nor usage: {event[:80]!r}")
            return
        choices = chunk.choices or ()
        self._count(chunk.usage, any(map(_carries_tokens, choices)), bool(choices), now)
        for choice in choices:
            if self._keep:
                self._texts.append(_said(choice))
                self.token_ids += choice.token_ids or ()
            if choice.finish_reason is not None:
                self.finished = True
                self.record.finish_reason = choice.finish_reason
                if choice.finish_reason in _ABORTED:
                    self.fail(Failure.STREAM_ERROR, f"finish_reason {choice.finish_reason!r}")

    def _count(self, usage: _Usage | None, carries_tokens: bool, has_choices: bool, now: float) -> None:
        record = self.record
        rise = 0
        if usage is not None:
            if usage.prompt_tokens is not None:
                record.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens
            if usage.completion_tokens is not None:
                record.output_tokens = usage.completion_tokens
                rise = usage.completion_tokens - self._counted
        # A usage beside choices is a running count if it has come with every token. Otherwise, and in the
        # last chunk, it is the sum.
        if has_choices and rise > 0 and len(record.tokens) == len(record.arrivals):
            self._counted += rise
            record.arrivals.append(now)
            record.tokens.append(rise)
        elif carries_tokens and not record.tokens:
            record.arrivals.append(now)


def _carries_tokens(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def _said(choice: _Choice) -> str:
    return (choice.text if choice.delta is None else choice.delta.content) or ""


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


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
    UNFINISHED = "unfinished"  # still running --advanced.drain seconds after the last was sent
    INTERRUPTED = "interrupted"  # Ctrl-C; does not count as a miss


class Record(msgspec.Struct, kw_only=True, tag=True):
    """One request. Times are seconds since the start of the run, on the client's monotonic clock.

    Attributes:
        bound: requests with the same number go to the same server.
        intended: when the request was due.
        lag: how late the client was.
        sent: when the request went out. Later than `intended` + `lag` only if `--concurrency` held it back.
        arrivals: when each chunk with tokens arrived.
        tokens: how many tokens each of these chunks had; empty if the server does not count them.
        asked_input: prompt tokens; 0 for a prompt of unknown length, as a text with answers in it.
        prompt_tokens, output_tokens, cached_tokens: as the server counted.
        skipped_turns: later turns of the session, which were not sent because this one failed.
    """

    index: int
    turn: int = 0
    session: str = ""
    bound: int = 0
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
    def name(self) -> str:
        """As logs of the server name the request. Empty: it is of no session."""
        return f"{self.session}-{self.turn}" if self.session else ""

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
    def refused(self) -> bool:
        """The server had no room. It may be asked again later."""
        return self.failure is Failure.HTTP and self.status == _TOO_MANY

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
        fields = msgspec.structs.asdict(self) | {"name": self.name}
        if self.ok:
            mean_gap = self.mean_gap
            fields |= {
                "ttft_ms": self.ttft * 1e3,
                "e2e_ms": self.e2e * 1e3,
                "itl_ms": None if mean_gap is None else mean_gap * 1e3,
            }
        return fields | {"error_class": self.error_class}
