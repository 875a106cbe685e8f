"""Writes the tokens of one generation into the token queue of its request, and measures their latency.

For the metrics a request waits until its first token, and then runs until its end.
"""

import time
from collections.abc import Sequence

from baton.router.errors import ApiError
from baton.router.generation.token_queue import Token, TokenQueue
from baton.router.metrics import Metrics
from baton.rpc import worker_pb2 as pb
from baton.rpc.tracing import Span

_FINISH = {pb.FINISH_REASON_NONE: "", pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class TokenWriter:
    """Of the generation with number `index` in its request."""

    __slots__ = ("_index", "_max_tokens", "_metrics", "_running", "_since", "_span", "_tokens")

    def __init__(self, tokens: TokenQueue, index: int, max_tokens: int, metrics: Metrics, span: Span) -> None:
        self._tokens = tokens
        self._index = index
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._span = span
        self._running = False
        self._since = time.monotonic()
        metrics.waiting.inc()

    def token(
        self, event: pb.TokenEvent, emitted: int, prompt: Sequence[pb.PromptLogprobs], *, handed_over: bool
    ) -> str:
        """Writes a token, the number `emitted` of its generation. Returns the finish reason or "".

        `prompt` as in `Token`. `handed_over`: a prefill worker computed the prompt.
        """
        self._measure(emitted, handed_over)
        # No token follows a finish reason, not even an unknown one of a newer worker.
        finish_reason = _FINISH.get(event.finish_reason, "length")
        if not finish_reason and emitted >= self._max_tokens:
            finish_reason = "length"
        logprobs = event.logprobs if event.HasField("logprobs") else None
        self._tokens.put(self._index, Token(event.token_id, logprobs, finish_reason, prompt))
        return finish_reason

    def error(self, error: ApiError) -> None:
        self._tokens.put(self._index, error)

    def end(self) -> None:
        (self._metrics.running if self._running else self._metrics.waiting).dec()

    def _measure(self, emitted: int, handed_over: bool) -> None:
        now = time.monotonic()
        since, self._since = now - self._since, now
        if not self._running:
            self._running = True
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.time_to_first_token.observe(since)
            self._span.set({"gen_ai.latency.time_to_first_token": since})
            return
        self._metrics.inter_token.observe(since)
        if emitted == 2 and handed_over:
            self._metrics.handover_gap.observe(since)
