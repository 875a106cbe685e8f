"""The open attempts at one worker: load, spans, failures and the loss of the stream."""

import time
from typing import cast

import pytest

from baton.router.policy.decode import DecodeLoad
from baton.router.policy.desk import Desk
from baton.router.policy.plan import Plan
from baton.router.policy.prefill_loads import PrefillWork
from baton.router.workers.worker import Attempt, Worker, WorkerState
from baton.rpc import worker_pb2 as pb
from baton.system.tracing import Span


class RecordedSpan:
    """Collects the errors with which it ended. It is its own child."""

    traceparent = ""
    exported = False

    def __init__(self) -> None:
        self.ends: list[str] = []

    def child(self, name: str, attributes: object, kind: str) -> "RecordedSpan":
        return self

    def end(self, error: str = "") -> None:
        self.ends.append(error)


def worker_with(span: RecordedSpan, tokens: int, work: PrefillWork) -> Worker:
    """A worker with 10 blocks of 16 positions, and one attempt "a" of so many positions."""
    desk = Desk(time.monotonic, seed=1)
    worker = Worker("w", desk, lambda: None, lambda _: None)
    worker.description = pb.WorkerDescription(block_size=16, num_blocks=10, max_num_seqs=4)
    worker.status.blocks_free = 10
    desk.join(worker)
    worker.state = WorkerState.READY
    attempt = Attempt(
        worker=worker,
        name="r1",
        on_event=lambda attempt, event: None,
        id=b"a",
        plan=Plan("handover"),
        tokens=tokens,
        work=work,
    )
    decode, prefill = pb.RouterMessage(decode=pb.SubmitDecode()), pb.RouterMessage(prefill=pb.SubmitPrefill())
    worker.submit(attempt, decode if tokens else prefill, cast("Span", span))
    return worker


def decoding(span: RecordedSpan) -> tuple[Worker, DecodeLoad]:
    worker = worker_with(span, 40, PrefillWork(8))
    return worker, worker.load


def failure(code: "pb.FailureCode", attempt_id: bytes = b"a") -> pb.AttemptFailed:
    return pb.AttemptFailed(attempt_id=attempt_id, code=code, message="m")


def test_a_decode_attempt_adds_its_load_until_it_ends() -> None:
    span = RecordedSpan()
    worker, load = decoding(span)
    assert (load.blocks_free, load.running, len(worker.attempts)) == (7, 1, 1)
    assert worker.forget(b"a", "lane broken")
    assert (load.blocks_free, load.running, len(worker.attempts)) == (10, 0, 0)
    assert span.ends == ["lane broken"]
    assert not worker.forget(b"a"), "the second end does nothing"
    assert load.blocks_free == 10


def test_a_refused_reservation_marks_the_worker_full() -> None:
    span = RecordedSpan()
    worker, load = decoding(span)
    assert worker.fail(failure(pb.FAILURE_CODE_NO_ROOM)) is not None
    assert (load.full, load.blocks_free, len(worker.attempts)) == (True, 10, 0)


def test_after_failed_kv_the_reservation_stays() -> None:
    span = RecordedSpan()
    worker, load = decoding(span)
    assert worker.fail(failure(pb.FAILURE_CODE_KV_FAILED)) is worker.attempts.get(b"a") is not None
    assert (load.blocks_free, span.ends) == (7, [])


@pytest.mark.parametrize("code", [pb.FAILURE_CODE_ENGINE, pb.FAILURE_CODE_KV_FAILED])
def test_a_failure_of_an_attempt_that_is_not_open_is_ignored(code: "pb.FailureCode") -> None:
    worker, load = decoding(RecordedSpan())
    assert worker.fail(failure(code, b"other")) is None
    assert load.blocks_free == 7


def test_the_work_of_a_prefill_ends_once() -> None:
    span = RecordedSpan()
    worker = worker_with(span, 0, PrefillWork(100))
    attempt = worker.attempts[b"a"]
    assert worker.desk.loads.router_tokens(worker.row) == 100
    for _ in range(2):
        worker.prefilled(attempt, computed=True)
    assert worker.desk.loads.router_tokens(worker.row) == 0
    assert span.ends == [""]
    assert len(worker.attempts) == 1, "the attempt is open until it ends"


def test_a_lost_stream_empties_the_table() -> None:
    span = RecordedSpan()
    worker, _ = decoding(span)
    assert [attempt.id for attempt in worker.lose_all()] == [b"a"]
    assert worker.attempts == {}
    assert span.ends == ["the worker was lost"]
