"""What became of each attempt, told to logs and traces.

    accepted → prefilled                      on a prefill worker
    accepted → injected | prefilled → decoded on a decode worker
    accepted → prefilled → decoded            there, when it prefills too
    accepted → failed | cancelled             on either, at any moment

An attempt is known here from its submission until the first of its ends. Times come from the engine process,
which knows nothing of logs or traces.
"""

import logging
import time
from dataclasses import dataclass

from rpc.logs import of_request
from rpc.tracing import Attributes, open_tracer
from worker import messages
from worker.config import WorkerConfig
from worker.messages import Code, ToEngine

log = logging.getLogger(__name__)

# Ends that are everyday life.
_QUIET = {Code.NO_ROOM, Code.FINISHED}


@dataclass(slots=True)
class _Known:
    id: bytes
    stream: int
    name: str  # of the request
    traceparent: str
    accepted_at: float  # time.monotonic()


class Journal:
    """Owned by the service process. Raises ValueError when traces cannot be sent as the user wants."""

    def __init__(self, config: WorkerConfig, incarnation: int) -> None:
        self._known: dict[bytes, _Known] = {}
        self._only_prefills = config.role == "prefill"
        self._decodes = config.role == "decode"
        worker: Attributes = {"baton.index": config.index, "service.instance.id": f"{incarnation:016x}"}
        self._tracer = open_tracer(config.otlp_endpoint, f"baton-{config.role}", worker)

    def close(self) -> None:
        self._tracer.close()

    # ------------------------------------------------------------ towards the engine

    def sent(self, message: ToEngine) -> None:
        match message:
            case messages.Prefill(stream, work) | messages.Decode(stream, work):
                request = work.request
                attempt_id = request.id
                if attempt_id not in self._known:  # else the engine will refuse it
                    known = _Known(attempt_id, stream, work.name, work.traceparent, time.monotonic())
                    self._known[attempt_id] = known
                    _say(known, "accepted, %d tokens", len(request.prompt_ids) + len(request.output_ids))
            case messages.Cancel(stream, attempt_id):
                known = self._known.get(attempt_id)
                if known is not None and known.stream == stream:
                    self._cancelled(attempt_id)
            case messages.CancelStream(stream):
                for attempt_id in [i for i, known in self._known.items() if known.stream == stream]:
                    self._cancelled(attempt_id)

    def _cancelled(self, attempt_id: bytes) -> None:
        _say(self._known.pop(attempt_id), "cancelled")

    # ------------------------------------------------------------ from the engine

    def prefilled(self, done: messages.Prefilled) -> None:
        known = self._known.get(done.attempt_id)
        if known is None:
            return  # cancelled while this was on its way
        if not self._decodes:
            del self._known[done.attempt_id]
        _say(
            known, "prefilled %d tokens, %d of them cached, in %.4f s after %.4f s",
            done.prompt_tokens, done.cached_tokens, done.token_at - done.began_at,
            done.began_at - done.accepted_at,
        )  # fmt: skip
        self._record("queue", known, known.accepted_at, done.began_at, {})
        self._record(
            "prefill",
            known,
            done.began_at,
            done.token_at,
            {
                "gen_ai.usage.prompt_tokens": done.prompt_tokens,
                "gen_ai.latency.time_in_queue": done.began_at - known.accepted_at,
                "gen_ai.latency.time_in_model_prefill": done.token_at - done.began_at,
                "baton.cached_tokens": done.cached_tokens,
            },
        )

    def injected(self, done: messages.Injected) -> None:
        known, stats = self._known.get(done.decode_id), done.stats
        if known is None:
            return
        _say(
            known, "%d bytes of KV in %.4f s, %.4f s of it after prefill's token",
            stats.bytes, stats.fetch_seconds, stats.exposed_seconds,
        )  # fmt: skip
        moved: Attributes = {"baton.kv.bytes": stats.bytes, "baton.kv.frames": stats.frames}
        exposed: Attributes = {"baton.kv.exposed_seconds": stats.exposed_seconds}
        self._record("transfer", known, stats.first_frame_at, stats.last_frame_at, moved)
        self._record("injection", known, stats.scatter_at, stats.injected_at, exposed)

    def decoded(self, done: messages.Decoded) -> None:
        known = self._known.pop(done.decode_id, None)
        if known is None:
            return
        took = done.ended_at - done.joined_at
        _say(known, "decoded %d tokens in %.4f s", done.output_tokens, took)
        self._record(
            "decode",
            known,
            done.joined_at,
            done.ended_at,
            {
                "gen_ai.usage.completion_tokens": done.output_tokens,
                "gen_ai.latency.time_in_model_decode": took,
            },
        )

    def failed(self, failure: messages.Failed) -> None:
        """KV that did not come leaves the attempt open; every other failure ends it."""
        keep = failure.code is Code.KV_FAILED
        known = self._known.get(failure.attempt_id) if keep else self._known.pop(failure.attempt_id, None)
        level = logging.DEBUG if failure.code in _QUIET else logging.INFO
        known = known or _Known(failure.attempt_id, failure.stream, "?", "", 0.0)
        _say(known, "%s: %s", failure.code.name.lower(), failure.message, level=level)

    def _record(self, name: str, known: _Known, start: float, end: float, attributes: Attributes) -> None:
        if self._tracer.on:
            about = {"gen_ai.request.id": known.name, **attributes}
            self._tracer.record(name, known.traceparent, start, end, about)


def _say(known: _Known, text: str, *values: object, level: int = logging.DEBUG) -> None:
    if log.isEnabledFor(level):
        text = "request %s, attempt %s: " + text
        log.log(level, text, known.name, known.id.hex(), *values, extra=of_request(known.name, known.id))
