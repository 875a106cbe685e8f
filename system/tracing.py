"""OpenTelemetry traces across routers and workers. One request is one trace.

Life of a trace:

1. A client may send a `traceparent` (W3C).
2. The router begins a span for the request, and under it a span for each attempt.
3. The `traceparent` of the attempt travels to the worker in the Request message.
4. The service process of the worker records the phases of the attempt as spans under it.

Only routers and service processes make spans. Engine and transfer processes report times of time.monotonic()
in their messages. All processes of a host share that clock.

OpenTelemetry is imported only if an endpoint is given. A thread of the SDK then exports the spans in batches
over OTLP/gRPC. The SDK's own variables (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, …) apply. Spans that
the receiver does not accept in time are lost. No request waits for an export.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry import trace

Attributes = Mapping[str, str | int | float | bool]
Kind = Literal["internal", "server", "client"]

EXPORT_SECONDS = 3.0
"""Time limit of one export. `Tracer.close` also takes at most this long if the receiver does not answer."""
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(sent: str | None) -> str:
    """Returns `sent` if it is a well-formed traceparent, else "". The value comes from the network."""
    return sent if sent and _TRACEPARENT.fullmatch(sent) else ""


class Tracer:
    """Makes spans. Times are those of time.monotonic(), in seconds.

    Attributes:
        on: False if spans are not exported.
    """

    def __init__(self, endpoint: str | None, service: str, attributes: Attributes) -> None:
        """`endpoint`: http://HOST:PORT or https://HOST:PORT of an OTLP/gRPC receiver. None: nothing is
        exported. `service` and `attributes` describe this process.

        Raises ValueError if `endpoint` has another form, or if OpenTelemetry is not installed. The caller
        closes the tracer.
        """
        self.on = endpoint is not None
        if endpoint is not None:
            self._start, self._close = _exporting(endpoint, service, attributes)

    def begin(self, name: str, traceparent: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        """Begins a span now, under the span that `traceparent` names.

        Without a name it begins a new trace.
        """
        if not self.on:
            return Span(self, None, traceparent)
        span = self._start(name, traceparent, time.monotonic(), attributes, kind)
        at = span.get_span_context()
        return Span(self, span, f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}")

    def record(self, name: str, traceparent: str, start: float, end: float, attributes: Attributes) -> None:
        """Records a span that has already ended."""
        if self.on:
            self._start(name, traceparent, start, attributes, "internal").end(time_of_day(end))

    def close(self) -> None:
        """Exports the remaining spans, for at most `EXPORT_SECONDS`."""
        if self.on:
            self._close()


class Span:
    """A span that has begun. The code that began it ends it.

    Attributes:
        traceparent: the name of this span for other processes; empty if there is no trace. If spans are not
            exported, it is that of the client. So a trace continues across this process.
    """

    __slots__ = ("_span", "_tracer", "traceparent")

    def __init__(self, tracer: Tracer, span: trace.Span | None, traceparent: str) -> None:
        """`span`: None if spans are not exported."""
        self._tracer = tracer
        self._span = span
        self.traceparent = traceparent

    @property
    def exported(self) -> bool:
        """Whether anything is recorded: without that no attribute needs to be made."""
        return self._span is not None

    def child(self, name: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        return self._tracer.begin(name, self.traceparent, attributes, kind)

    def set(self, attributes: Attributes) -> None:
        if self._span is not None:
            self._span.set_attributes(dict(attributes))

    def end(self, error: str = "") -> None:
        """Idempotent: the first end counts."""
        if self._span is not None and self._span.is_recording():
            if error:
                from opentelemetry.trace import StatusCode

                self._span.set_status(StatusCode.ERROR, error)
            self._span.end(time_of_day(time.monotonic()))


def _exporting(
    endpoint: str, service: str, attributes: Attributes
) -> tuple[Callable[[str, str, float, Attributes, Kind], trace.Span], Callable[[], None]]:
    """Returns a function that starts a span (name, traceparent, time, attributes, kind), and one that ends
    the export."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"--advanced.otlp-endpoint must be http://HOST:PORT or https://HOST:PORT, not {endpoint!r}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise ValueError(
            f"--advanced.otlp-endpoint: tracing needs OpenTelemetry ({error}); in Baton's source directory "
            "`pip install -e '.[otel]'` installs it"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": service, **attributes}))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer, extract = provider.get_tracer("baton"), TraceContextTextMapPropagator().extract

    def start(name: str, traceparent: str, at: float, attributes: Attributes, kind: Kind) -> trace.Span:
        return tracer.start_span(
            name,
            context=extract({"traceparent": traceparent} if traceparent else {}),
            kind=SpanKind[kind.upper()],
            attributes=dict(attributes),
            start_time=time_of_day(at),
        )

    def close() -> None:
        # The SDK would export the remaining batches one after the other, and wait for each.
        give_up = threading.Timer(EXPORT_SECONDS, exporter.shutdown)
        give_up.daemon = True
        give_up.start()
        provider.shutdown()
        give_up.cancel()

    return start, close


def time_of_day(at: float) -> int:
    """Converts a time.monotonic() in seconds to nanoseconds since the epoch."""
    # This process may lose its CPU between two readings, for some milliseconds.
    readings = [
        (time.monotonic_ns(), time.time_ns(), time.monotonic_ns())  # noqa: TID251 - a timestamp
        for _ in range(3)
    ]
    before, now, _ = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - before + int(at * 1e9)
