"""Writes the life of each attempt to logs and traces, and remembers the last phases for people who ask. Open
attempts are kept for the next engine process (`open_attempts`).

- Of a prefill: accepted → prefilled.
- Of a decode: accepted → injected → decoded, or accepted → prefilled → decoded if this worker prefills.
- Of both: accepted → failed or cancelled, at any time.

The messages of the engine process have the times, and the origin of the attempt.
"""

import logging
from collections import deque
from typing import NamedTuple

from baton.rpc import worker_pb2 as pb
from baton.system.logs import of_request
from baton.system.tracing import Attributes, Tracer, time_of_day
from baton.worker import messages
from baton.worker.config import WorkerConfig
from baton.worker.messages import FromRouter, Origin
from baton.worker.service_process.open_attempts import OpenAttempts

log = logging.getLogger(__name__)

_ROUTINE = {
    pb.FAILURE_CODE_NO_ROOM,
    pb.FAILURE_CODE_FINISHED,
}  # frequent failures, which are logged at debug level
PHASES = 1024
"""That are remembered, of all requests."""


class _Phase(NamedTuple):
    """Times are time.monotonic()."""

    request: str
    kind: str
    start: float
    end: float
    attributes: Attributes


class Journal:
    """The attempts of one worker. Owned by the service process.

    Raises ValueError if `config.otlp_endpoint` cannot be used.

    Attributes:
        open: what the next engine process must be told. It stays empty if none can follow.
    """

    def __init__(self, config: WorkerConfig, incarnation: int) -> None:
        worker: Attributes = {"baton.index": config.index, "service.instance.id": f"{incarnation:016x}"}
        self._tracer = Tracer(config.otlp_endpoint, f"baton-{config.role}", worker)
        self._phases: deque[_Phase] = deque(maxlen=PHASES)
        self.open = OpenAttempts(config.deadlines.hold if config.replace_engine else None)

    def close(self) -> None:
        self._tracer.close()

    def said(self, message: FromRouter, said: pb.RouterMessage) -> None:
        """A router says this: the same message, read. Raises RefusedAttempt for an id that is in use."""
        self.open.said(message, said)
        if message.origin is not None:
            _log_attempt(message.origin, "accepted")

    def report(self, done: messages.Report) -> None:
        origin = done.origin
        match done:
            case messages.Prefilled():
                self._prefilled(origin, done)
            case messages.Encoded(_, began_at, ended_at, tokens):
                _log_attempt(origin, "encoded %d tokens in %.4f s", tokens, ended_at - began_at)
                self._record("encode", origin, began_at, ended_at, {"baton.image_tokens": tokens})
            case messages.KVInjected(_, stats):
                _log_attempt(
                    origin, "%d bytes of KV in %.4f s, %.4f s of it after prefill's token",
                    stats.bytes, stats.fetch_seconds, stats.exposed_seconds,
                )  # fmt: skip
                moved: Attributes = {"baton.kv.bytes": stats.bytes, "baton.kv.frames": stats.frames}
                exposed: Attributes = {"baton.kv.exposed_seconds": stats.exposed_seconds}
                self._record("transfer", origin, stats.first_frame_at, stats.last_frame_at, moved)
                self._record("injection", origin, stats.scatter_at, stats.injected_at, exposed)
            case messages.Decoded(_, joined_at, ended_at, output_tokens):
                took = ended_at - joined_at
                _log_attempt(origin, "decoded %d tokens in %.4f s", output_tokens, took)
                sampled: Attributes = {
                    "gen_ai.usage.completion_tokens": output_tokens,
                    "gen_ai.latency.time_in_model_decode": took,
                }
                self._record("decode", origin, joined_at, ended_at, sampled)
            case messages.Failed(_, code, message):
                level = logging.DEBUG if code in _ROUTINE else logging.INFO
                name = pb.FailureCode.Name(code).removeprefix("FAILURE_CODE_").lower()
                _log_attempt(origin, "%s: %s", name, message, level=level)
            case messages.Cancelled():
                _log_attempt(origin, "cancelled")

    def _prefilled(self, origin: Origin, done: messages.Prefilled) -> None:
        _log_attempt(
            origin, "prefilled %d tokens, %d of them cached, in %.4f s after %.4f s",
            done.prompt_tokens, done.cached_tokens, done.token_at - done.began_at,
            done.began_at - done.queued_at,
        )  # fmt: skip
        self._record("queue", origin, origin.accepted_at, done.began_at, {})
        if done.images_asked_at:
            self._record("encode", origin, done.images_asked_at, done.images_encoded_at, {})
        computed: Attributes = {
            "gen_ai.usage.prompt_tokens": done.prompt_tokens,
            "gen_ai.latency.time_in_queue": done.began_at - origin.accepted_at,
            "gen_ai.latency.time_in_model_prefill": done.token_at - done.began_at,
            "baton.cached_tokens": done.cached_tokens,
        }
        self._record("prefill", origin, done.began_at, done.token_at, computed)

    def phases(self, request: str) -> list[pb.Phase]:
        """Those of a recent request, by the id that its client knows, in the order in which they ended."""
        return [
            pb.Phase(
                kind=each.kind,
                start=time_of_day(each.start) / 1e9,
                seconds=each.end - each.start,
                about={key: value for key, value in each.attributes.items() if not isinstance(value, str)},
            )
            for each in self._phases
            if each.request == request
        ]

    def _record(self, name: str, origin: Origin, start: float, end: float, attributes: Attributes) -> None:
        self._phases.append(_Phase(origin.name, name, start, end, attributes))
        if self._tracer.on:
            about = {"gen_ai.request.id": origin.name, **attributes}
            self._tracer.record(name, origin.traceparent, start, end, about)


def _log_attempt(origin: Origin, text: str, *values: object, level: int = logging.DEBUG) -> None:
    if log.isEnabledFor(level):
        text = "request %s, attempt %s: " + text
        named = of_request(origin.name, origin.attempt_id)
        log.log(level, text, origin.name, origin.attempt_id.hex(), *values, extra=named)
