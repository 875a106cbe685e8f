"""A real OTLP/gRPC receiver of traces, for tests."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.within import WITHIN


@dataclass(frozen=True)
class Span:
    name: str
    process: str  # service.name and index
    id: str
    parent: str  # empty: the root of its trace
    start: int  # ns
    end: int
    attributes: dict[str, Any]
    error: str | None


class Receiver(stubs.TraceServiceServicer):
    """Listens from the beginning; keeps all spans, by trace id."""

    def __init__(self) -> None:
        self._traces: dict[str, list[Span]] = {}
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        stubs.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        with self._news:
            for resource in request.resource_spans:
                process = _plain(resource.resource.attributes)
                name = f"{process['service.name']} {process['baton.index']}"
                for span in (s for scope in resource.scope_spans for s in scope.spans):
                    failed = span.status.code == Status.STATUS_CODE_ERROR
                    made = Span(
                        span.name, name, span.span_id.hex(), span.parent_span_id.hex(),
                        span.start_time_unix_nano, span.end_time_unix_nano, _plain(span.attributes),
                        span.status.message if failed else None,
                    )  # fmt: skip
                    self._traces.setdefault(span.trace_id.hex(), []).append(made)
            self._news.notify_all()
        return service.ExportTraceServiceResponse()

    def trace(self, trace_id: str, spans: int) -> list[Span]:
        """Waits until this trace has so many spans; they leave their processes in batches."""
        deadline = time.monotonic() + WITHIN
        with self._news:
            while len(found := self._traces.get(trace_id, [])) < spans:
                assert self._news.wait(deadline - time.monotonic()), f"{len(found)} of {spans}: {found}"
            return sorted(found, key=lambda span: span.start)


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in attributes}
