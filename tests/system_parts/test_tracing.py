"""Tracers: off, with a wrong endpoint, without OpenTelemetry, and with a receiver that does not answer."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from baton.system import tracing
from baton.system.tracing import Tracer, valid_traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_tracer_that_is_off_passes_the_traceparent_on() -> None:
    tracer = Tracer(None, "baton", {})
    span = tracer.begin("request", PARENT, {})
    assert not tracer.on
    assert span.child("attempt", {}).traceparent == PARENT
    span.end("error")
    tracer.close()


@pytest.mark.parametrize(
    "sent",
    [None, "", "x", PARENT + "0", PARENT.upper(), "01" + PARENT[2:], PARENT[:-2] + "\n1", "0" * 10_000],
)
def test_a_malformed_traceparent_is_dropped(sent: str | None) -> None:
    assert valid_traceparent(sent) == ""
    assert valid_traceparent(PARENT) == PARENT


def test_an_endpoint_without_http_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--advanced\.otlp-endpoint must be http://HOST:PORT"):
        Tracer("127.0.0.1:4317", "baton", {})


@pytest.mark.all
def test_opentelemetry_is_needed_only_for_an_endpoint() -> None:
    """Without an endpoint it is never imported. With one, the error says how to install it."""
    script = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from baton.system.tracing import Tracer
import baton.router, baton.worker.service_process.service
Tracer(None, "baton", {})
print("off")
Tracer("http://127.0.0.1:1", "baton", {})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "off\n", done.stderr
    assert "ValueError: --advanced.otlp-endpoint: tracing needs OpenTelemetry" in done.stderr
    assert "pip install -e '.[otel]'" in done.stderr


def test_a_time_of_day_is_right_on_a_machine_that_takes_the_cpu_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so within the first and the third reading, for a second."""
    day, second = 10**18, 10**9
    seconds = [(0, 1, 1), (2, 2, 2), (3, 3, 4)]
    readings = iter([n * second + day * (i == 1) for reading in seconds for i, n in enumerate(reading)])
    clock = SimpleNamespace(monotonic_ns=lambda: next(readings), time_ns=lambda: next(readings))
    monkeypatch.setattr(tracing, "time", clock)
    assert tracing.time_of_day(1.5) == day + 1_500_000_000


def test_close_waits_at_most_export_seconds_for_a_receiver_that_does_not_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.5)
    tracer = Tracer("http://127.0.0.1:1", "baton", {})
    for _ in range(2000):
        tracer.record("queue", PARENT, 1.0, 2.0, {})
    tracer.close()
    assert "Failed to export" in caplog.text
