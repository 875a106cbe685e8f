"""Tracing that is off costs nothing and breaks nothing; what is missing is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rpc import tracing
from rpc.tracing import open_tracer, valid_traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_off_it_passes_on_what_came() -> None:
    tracer = open_tracer(None, "baton", {})
    span = tracer.begin("request", PARENT, {})
    assert not tracer.on
    assert span.child("attempt", {}).traceparent == PARENT
    span.end("never seen")
    tracer.close()


@pytest.mark.parametrize(
    "sent",
    [None, "", "x", PARENT + "0", PARENT.upper(), "01" + PARENT[2:], PARENT[:-2] + "\n1", "0" * 10_000],
)
def test_what_is_no_traceparent_is_none(sent: str | None) -> None:
    assert valid_traceparent(sent) == ""
    assert valid_traceparent(PARENT) == PARENT


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(ValueError, match="--otlp-endpoint must be http://HOST:PORT"):
        open_tracer("127.0.0.1:4317", "baton", {})


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:1"])
def test_without_opentelemetry(endpoint: str | None) -> None:
    """Off, it is not even looked for; on, the error says what to install."""
    script = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from rpc import tracing
from rpc.tracing import open_tracer
import router, worker.service
open_tracer({endpoint!r}, "baton", {{}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    if endpoint is None:
        assert done.returncode == 0, done.stderr
    else:
        assert "ValueError: --otlp-endpoint: tracing needs OpenTelemetry" in done.stderr
        assert "pip install -e '.[otel]'" in done.stderr


def test_a_receiver_that_is_gone_ends_nothing_but_spans(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes waits for `EXPORT_SECONDS`, however much is left."""
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.5)
    tracer = open_tracer("http://127.0.0.1:1", "baton", {})
    for _ in range(2000):
        tracer.record("queue", PARENT, 1.0, 2.0, {})
    tracer.close()
    assert "Failed to export" in caplog.text
