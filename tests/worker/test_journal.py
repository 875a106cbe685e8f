"""The logs and traces of attempts, which the journal makes from the messages of the engine."""

import logging
import os
import time
from collections.abc import Iterator

import pytest

from baton.engine import EngineConfig
from baton.kv_transfer import InjectStats
from baton.rpc import worker_pb2 as pb
from baton.system import tracing
from baton.worker import messages
from baton.worker.config import Role, WorkerConfig
from baton.worker.service_process import validation
from baton.worker.service_process.journal import Journal
from tests.cluster_helpers import request, sampling
from tests.otlp import Receiver, Span


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


class Worker:
    """A journal and one attempt."""

    def __init__(self, role: Role, receiver: Receiver) -> None:
        config = WorkerConfig(
            engine_module="engine",
            role=role, index=2, engine=EngineConfig(model="none"), secret=b"s" * 16,
            otlp_endpoint=receiver.endpoint,
        )  # fmt: skip
        self.journal = Journal(config, 7)
        self.attempt, self.trace_id, self.parent = os.urandom(16), os.urandom(16).hex(), os.urandom(8).hex()
        self.receiver = receiver

    def submit(self) -> messages.Origin:
        asked = request([1] * 10, sampling(), [2])
        asked.name, asked.traceparent = "mine", f"00-{self.trace_id}-{self.parent}-01"
        origin = validation.submission(self.attempt, asked, validation.Limits(100, 100)).origin
        assert origin is not None
        self.journal.said(messages.FromRouter(1, b"", origin), pb.RouterMessage())
        return origin

    def spans(self, count: int) -> dict[str, Span]:
        self.journal.close()
        return {span.name: span for span in self.receiver.trace(self.trace_id, count)}


def test_a_prefill_makes_spans_and_log_lines(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "baton.worker")
    worker, now = Worker("prefill", receiver), time.monotonic()
    origin = worker.submit()
    worker.journal.report(messages.Prefilled(origin, now, now + 1, now + 3, 11, 4))
    spans = worker.spans(2)
    queue, prefill = spans["queue"], spans["prefill"]
    assert {span.parent for span in spans.values()} == {worker.parent}
    assert {span.process for span in spans.values()} == {"baton-prefill 2"}
    assert prefill.end - prefill.start == pytest.approx(2e9, abs=1e6)
    assert queue.end == pytest.approx(prefill.start, abs=1e6)
    assert prefill.attributes["gen_ai.usage.prompt_tokens"] == 11
    assert prefill.attributes["baton.cached_tokens"] == 4
    assert prefill.attributes["gen_ai.request.id"] == "mine"
    logged = [(record.request_id, record.attempt_id) for record in caplog.records]  # pyrefly: ignore[missing-attribute]
    assert logged == [("mine", worker.attempt.hex())] * 2
    assert "prefilled 11 tokens, 4 of them cached, in 2.0000 s after 1.0000 s" in caplog.text


def test_a_prompt_with_images_has_a_span_for_the_encoder(receiver: Receiver) -> None:
    worker, now = Worker("prefill", receiver), time.monotonic()
    origin = worker.submit()
    worker.journal.report(messages.Prefilled(origin, now, now + 1, now + 9, 11, 4, now + 2, now + 5))
    found = {each.kind: each.seconds for each in worker.journal.phases("mine")}
    assert found == {"queue": pytest.approx(now + 1 - origin.accepted_at), "encode": 3, "prefill": 8}
    encode = worker.spans(3)["encode"]
    assert encode.end - encode.start == pytest.approx(3e9, abs=1e6)


def test_an_encoder_makes_a_span_for_an_image(receiver: Receiver) -> None:
    worker, now = Worker("encode", receiver), time.monotonic()
    worker.journal.report(messages.Encoded(worker.submit(), now, now + 2, 2040))
    assert [(each.kind, each.seconds) for each in worker.journal.phases("mine")] == [("encode", 2)]
    span = worker.spans(1)["encode"]
    assert (span.parent, span.process) == (worker.parent, "baton-encode 2")
    assert span.attributes["baton.image_tokens"] == 2040


def test_a_decode_makes_spans(receiver: Receiver) -> None:
    worker, now = Worker("decode", receiver), time.monotonic()
    origin = worker.submit()
    stats = InjectStats(1000, 10, 3, now, now + 1, now + 3, now + 3, now, now + 2, now + 4)
    worker.journal.report(messages.KVInjected(origin, stats))
    worker.journal.report(messages.Decoded(origin, now + 4, now + 9, 6))
    phases = worker.journal.phases("mine")
    assert [(each.kind, each.seconds) for each in phases] == [
        ("transfer", 2), ("injection", 2), ("decode", 5),
    ]  # fmt: skip
    assert phases[0].about["baton.kv.bytes"] == 1000
    assert phases[0].start == pytest.approx(tracing.time_of_day(now + 1) / 1e9, abs=1e-3)
    assert worker.journal.phases("another") == []
    spans = worker.spans(3)
    seconds = {name: (span.end - span.start) / 1e9 for name, span in spans.items()}
    assert seconds == pytest.approx({"transfer": 2.0, "injection": 2.0, "decode": 5.0}, abs=1e-3)
    assert spans["transfer"].attributes["baton.kv.bytes"] == 1000
    assert spans["decode"].attributes["gen_ai.usage.completion_tokens"] == 6


def test_only_failures_are_logged_at_info(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.worker")
    worker = Worker("decode", receiver)
    origin = worker.submit()
    for code, why in (
        (pb.FAILURE_CODE_KV_FAILED, "lost"),
        (pb.FAILURE_CODE_NO_ROOM, "full"),
        (pb.FAILURE_CODE_ENGINE, "not finite"),
    ):
        worker.journal.report(messages.Failed(origin, code, why))
    worker.journal.report(messages.Cancelled(origin))
    worker.journal.close()
    assert [record.getMessage() for record in caplog.records if record.name == Journal.__module__] == [
        f"request mine, attempt {worker.attempt.hex()}: kv_failed: lost",
        f"request mine, attempt {worker.attempt.hex()}: engine: not finite",
    ]
