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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | int | float | bool]
Kind = Literal["internal", "server", "client"]

EXPORT_SECONDS = 3.0
"""Time limit of one export. `Tracer.close` also takes at most this long if the receiver does not answer."""
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(sent: str | None) -> str:
    """Returns `sent` if it is a well-formed traceparent, else "". The value comes from the network."""
    return sent if sent and _TRACEPARENT.fullmatch(sent) else ""


class Span(Protocol):
    """A span that has begun. The code that began it ends it.

    Attributes:
        traceparent: the name of this span for other processes; empty if there is no trace.
    """

    traceparent: str

    def child(self, name: str, attributes: Attributes, kind: Kind = "internal") -> Span: ...
    def set(self, attributes: Attributes) -> None: ...
    def end(self, error: str = "") -> None:
        """Idempotent: the first end counts."""


class Tracer(Protocol):
    """Makes spans.

    Times are those of time.monotonic(), in seconds. `on` is False if spans are not exported.
    """

    on: bool

    def begin(self, name: str, traceparent: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        """Begins a span now, under the span that `traceparent` names.

        Without a name it begins a new trace.
        """
        ...

    def record(
        self,
        name: str,
        traceparent: str,
        start: float,
        end: float,
        attributes: Attributes,
        kind: Kind = "internal",
    ) -> None:
        """Records a span that has already ended."""

    def close(self) -> None:
        """Exports the remaining spans, for at most `EXPORT_SECONDS`."""


def open_tracer(endpoint: str | None, service: str, attributes: Attributes) -> Tracer:
    """Returns a tracer that exports to `endpoint`, or one that exports nothing if `endpoint` is None.

    `endpoint` is the http://HOST:PORT or https://HOST:PORT of an OTLP/gRPC receiver. `service` and
    `attributes` describe this process. Raises ValueError if `endpoint` has another form, or if OpenTelemetry
    is not installed. The caller closes the tracer.
    """
    return _OtlpTracer(endpoint, service, attributes) if endpoint else _NoTracer()


class _NoTracer:
    """Exports nothing. Its spans keep the client's traceparent, so a trace continues across this process."""

    on = False

    def begin(self, name: str, traceparent: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        return _NoSpan(traceparent)

    def record(
        self,
        name: str,
        traceparent: str,
        start: float,
        end: float,
        attributes: Attributes,
        kind: Kind = "internal",
    ) -> None:
        pass

    def close(self) -> None:
        pass


class _NoSpan:
    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def child(self, name: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        return self

    def set(self, attributes: Attributes) -> None:
        pass

    def end(self, error: str = "") -> None:
        pass


class _OtlpTracer:
    on = True

    def __init__(self, endpoint: str, service: str, attributes: Attributes) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT, not {endpoint!r}"
            )
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                f"--otlp-endpoint: tracing needs OpenTelemetry ({error}); in Baton's source directory "
                "`pip install -e '.[otel]'` installs it"
            ) from error
        self.api = trace
        self._extract = TraceContextTextMapPropagator().extract
        resource = Resource.create({"service.name": service, **attributes})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("baton")

    def begin(self, name: str, traceparent: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        return _OtlpSpan(self, self.start(name, traceparent, time.monotonic(), attributes, kind))

    def record(
        self,
        name: str,
        traceparent: str,
        start: float,
        end: float,
        attributes: Attributes,
        kind: Kind = "internal",
    ) -> None:
        self.start(name, traceparent, start, attributes, kind).end(_time_of_day(end))

    def start(self, name: str, traceparent: str, at: float, attributes: Attributes, kind: Kind) -> trace.Span:
        context = self._extract({"traceparent": traceparent}) if traceparent else self._extract({})
        return self._tracer.start_span(
            name,
            context=context,
            kind=self.api.SpanKind[kind.upper()],
            attributes=dict(attributes),
            start_time=_time_of_day(at),
        )

    def close(self) -> None:
        # The SDK would export the remaining batches one after the other, and wait for each.
        give_up = threading.Timer(EXPORT_SECONDS, self._exporter.shutdown)
        give_up.daemon = True
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


class _OtlpSpan:
    def __init__(self, tracer: _OtlpTracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span: Any = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(self, name: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        return self._tracer.begin(name, self.traceparent, attributes, kind)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str = "") -> None:
        if self._span.is_recording():
            if error:
                self._span.set_status(self._tracer.api.StatusCode.ERROR, error)
            self._span.end(_time_of_day(time.monotonic()))


def _time_of_day(at: float) -> int:
    """Converts a time.monotonic() in seconds to nanoseconds since the epoch."""
    return time.time_ns() - time.monotonic_ns() + int(at * 1e9)  # noqa: TID251 - a timestamp
