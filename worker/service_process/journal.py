"""Writes the life of each attempt to logs and traces.

- Of a prefill: accepted → prefilled.
- Of a decode: accepted → injected → decoded, or accepted → prefilled → decoded if this worker prefills.
- Of both: accepted → failed or cancelled, at any time.

The journal keeps an attempt from its submission to its end. The times come from the messages of the engine
process.
"""

import logging
import time
from dataclasses import dataclass

from baton.machine.logs import of_request
from baton.machine.tracing import Attributes, Tracer
from baton.worker import messages
from baton.worker.config import WorkerConfig
from baton.worker.messages import Code, ToEngine

log = logging.getLogger(__name__)

_ROUTINE = {Code.NO_ROOM, Code.FINISHED}  # frequent failures, which are logged at debug level


@dataclass(slots=True)
class _OpenAttempt:
    id: bytes
    stream: int
    name: str  # of the request
    traceparent: str
    accepted_at: float  # time.monotonic()
    decodes: bool


class Journal:
    """Logs and traces of the attempts of one worker. Owned by the service process.

    Raises ValueError if `config.otlp_endpoint` cannot be used.
    """

    def __init__(self, config: WorkerConfig, incarnation: int) -> None:
        self._open: dict[bytes, _OpenAttempt] = {}
        worker: Attributes = {"baton.index": config.index, "service.instance.id": f"{incarnation:016x}"}
        self._tracer = Tracer(config.otlp_endpoint, f"baton-{config.role}", worker)

    def close(self) -> None:
        self._tracer.close()

    # ------------------------------------------------------------ towards the engine

    def sent(self, message: ToEngine) -> None:
        match message:
            case messages.Prefill(stream, work) | messages.Decode(stream, work):
                request = work.request
                attempt_id = request.id
                if attempt_id not in self._open:  # else the id is in use, and the engine refuses it
                    attempt = _OpenAttempt(
                        attempt_id, stream, work.name, work.traceparent, time.monotonic(),
                        decodes=isinstance(message, messages.Decode),
                    )  # fmt: skip
                    self._open[attempt_id] = attempt
                    _log_attempt(
                        attempt, "accepted, %d tokens", len(request.prompt_ids) + len(request.output_ids)
                    )
            case messages.Cancel(stream, attempt_id):
                attempt = self._open.get(attempt_id)
                if attempt is not None and attempt.stream == stream:
                    self._cancelled(attempt_id)
            case messages.CancelStream(stream):
                for attempt_id in [i for i, attempt in self._open.items() if attempt.stream == stream]:
                    self._cancelled(attempt_id)

    def _cancelled(self, attempt_id: bytes) -> None:
        _log_attempt(self._open.pop(attempt_id), "cancelled")

    # ------------------------------------------------------------ from the engine

    def prefilled(self, done: messages.Prefilled) -> None:
        attempt = self._open.get(done.attempt_id)
        if attempt is None:
            return  # the attempt was cancelled before this message arrived
        if not attempt.decodes:
            del self._open[done.attempt_id]
        _log_attempt(
            attempt, "prefilled %d tokens, %d of them cached, in %.4f s after %.4f s",
            done.prompt_tokens, done.cached_tokens, done.token_at - done.began_at,
            done.began_at - done.accepted_at,
        )  # fmt: skip
        self._record("queue", attempt, attempt.accepted_at, done.began_at, {})
        self._record(
            "prefill",
            attempt,
            done.began_at,
            done.token_at,
            {
                "gen_ai.usage.prompt_tokens": done.prompt_tokens,
                "gen_ai.latency.time_in_queue": done.began_at - attempt.accepted_at,
                "gen_ai.latency.time_in_model_prefill": done.token_at - done.began_at,
                "baton.cached_tokens": done.cached_tokens,
            },
        )

    def injected(self, done: messages.KVInjected) -> None:
        attempt, stats = self._open.get(done.decode_id), done.stats
        if attempt is None:
            return
        _log_attempt(
            attempt, "%d bytes of KV in %.4f s, %.4f s of it after prefill's token",
            stats.bytes, stats.fetch_seconds, stats.exposed_seconds,
        )  # fmt: skip
        moved: Attributes = {"baton.kv.bytes": stats.bytes, "baton.kv.frames": stats.frames}
        exposed: Attributes = {"baton.kv.exposed_seconds": stats.exposed_seconds}
        self._record("transfer", attempt, stats.first_frame_at, stats.last_frame_at, moved)
        self._record("injection", attempt, stats.scatter_at, stats.injected_at, exposed)

    def decoded(self, done: messages.Decoded) -> None:
        attempt = self._open.pop(done.decode_id, None)
        if attempt is None:
            return
        took = done.ended_at - done.joined_at
        _log_attempt(attempt, "decoded %d tokens in %.4f s", done.output_tokens, took)
        self._record(
            "decode",
            attempt,
            done.joined_at,
            done.ended_at,
            {
                "gen_ai.usage.completion_tokens": done.output_tokens,
                "gen_ai.latency.time_in_model_decode": took,
            },
        )

    def failed(self, failure: messages.AttemptFailed) -> None:
        """Logs a failure. KV_FAILED leaves the attempt open; every other failure ends it."""
        keep = failure.code is Code.KV_FAILED
        attempt = self._open.get(failure.attempt_id) if keep else self._open.pop(failure.attempt_id, None)
        level = logging.DEBUG if failure.code in _ROUTINE else logging.INFO
        attempt = attempt or _OpenAttempt(failure.attempt_id, failure.stream, "?", "", 0.0, decodes=False)
        _log_attempt(attempt, "%s: %s", failure.code.name.lower(), failure.message, level=level)

    def _record(
        self, name: str, attempt: _OpenAttempt, start: float, end: float, attributes: Attributes
    ) -> None:
        if self._tracer.on:
            about = {"gen_ai.request.id": attempt.name, **attributes}
            self._tracer.record(name, attempt.traceparent, start, end, about)


def _log_attempt(attempt: _OpenAttempt, text: str, *values: object, level: int = logging.DEBUG) -> None:
    if log.isEnabledFor(level):
        text = "request %s, attempt %s: " + text
        log.log(
            level, text, attempt.name, attempt.id.hex(), *values, extra=of_request(attempt.name, attempt.id)
        )
