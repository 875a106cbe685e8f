"""OpenTelemetry traces over routers and workers: one request is one trace.

Life of a trace: the client's `traceparent` (W3C), or none → the router's span of the request → its span of
each attempt, whose `traceparent` travels in the worker's Request → the worker's spans of what became of it.
Spans are made by the router and by the service processes of workers only. Engine and transfer processes know
nothing of this: their messages carry times of time.monotonic(), which all processes of a host share.

Nothing of OpenTelemetry is imported unless an endpoint is given. Then spans leave in batches, from a thread
of the SDK, over OTLP/gRPC; its own variables (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, …) hold. What
the receiver does not take in time is lost, never waited for.
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
"""What an export may take, and with it what a receiver that is gone adds to the end of a process."""
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(sent: str | None) -> str:
    """As sent, or empty where it is none: it came over the network."""
    return sent if sent and _TRACEPARENT.fullmatch(sent) else ""


class Span(Protocol):
    """Something that began.

    Attributes:
        traceparent: names it to other processes; empty: there is no trace.
    """

    traceparent: str

    def child(self, name: str, attributes: Attributes, kind: Kind = "internal") -> Span: ...
    def set(self, attributes: Attributes) -> None: ...
    def end(self, error: str = "") -> None:
        """Idempotent: the first end counts."""


class Tracer(Protocol):
    """Times are time.monotonic()."""

    on: bool

    def begin(self, name: str, traceparent: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        """A span that begins now, under the one that `traceparent` names; empty: of a new trace."""
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
        """A span that is over."""

    def close(self) -> None:
        """Sends what is left, for `EXPORT_SECONDS` at most."""


def open_tracer(endpoint: str | None, service: str, attributes: Attributes) -> Tracer:
    """`endpoint` is http://HOST:PORT or https://HOST:PORT of an OTLP/gRPC receiver; None traces nothing.

    `service` and `attributes` describe this process. Raises ValueError for an endpoint that is none, and
    where OpenTelemetry is not installed.
    """
    return _On(endpoint, service, attributes) if endpoint else _Off()


class _Off:
    """Passes on what clients sent: a proxy without tracing leaves traces whole."""

    on = False

    def begin(self, name: str, traceparent: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        return _OffSpan(traceparent)

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


class _OffSpan:
    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def child(self, name: str, attributes: Attributes, kind: Kind = "internal") -> Span:
        return self

    def set(self, attributes: Attributes) -> None:
        pass

    def end(self, error: str = "") -> None:
        pass


class _On:
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
        return _OnSpan(self, self.start(name, traceparent, time.monotonic(), attributes, kind))

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
        # The SDK would wait for each batch that is left, one after the other.
        give_up = threading.Timer(EXPORT_SECONDS, self._exporter.shutdown)
        give_up.daemon = True
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


class _OnSpan:
    def __init__(self, tracer: _On, span: trace.Span) -> None:
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
    """Nanoseconds since the epoch, of a time.monotonic()."""
    return time.time_ns() - time.monotonic_ns() + int(at * 1e9)
