"""The table of attempts at one worker: load, spans, failures and the loss of the stream."""

from typing import cast

import pytest

from baton.machine.tracing import Span
from baton.router.policy import DecodeLoad, PrefillWork
from baton.router.workers.attempts import Attempt, AttemptTable
from baton.rpc import worker_pb2 as pb


class RecordedSpan:
    """Collects the errors with which it ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def end(self, error: str = "") -> None:
        self.ends.append(error)


def attempt(span: RecordedSpan, tokens: int, work: PrefillWork) -> Attempt:
    return Attempt("r1", lambda event: None, cast("Span", span), tokens, work)


def decode_table(span: RecordedSpan) -> tuple[AttemptTable, DecodeLoad]:
    """A decode worker with 10 blocks of 16 positions, and one attempt of 40 positions."""
    table = AttemptTable()
    load = table.load = DecodeLoad("w", 16, 10, 4, blocks_free=10)
    table.add(b"d", attempt(span, 40, PrefillWork(8)))
    return table, load


def failure(code: "pb.FailureCode", attempt_id: bytes = b"d") -> pb.AttemptFailed:
    return pb.AttemptFailed(attempt_id=attempt_id, code=code, message="m")


def test_a_decode_attempt_adds_its_load_until_it_ends() -> None:
    span = RecordedSpan()
    table, load = decode_table(span)
    assert (load.blocks_free, load.running, len(table)) == (7, 1, 1)
    assert table.end(b"d", "lane broken") is not None
    assert (load.blocks_free, load.running, len(table)) == (10, 0, 0)
    assert span.ends == ["lane broken"]
    assert table.end(b"d") is None, "the second end does nothing"
    assert load.blocks_free == 10


def test_a_refused_reservation_marks_the_worker_full() -> None:
    span = RecordedSpan()
    table, load = decode_table(span)
    assert table.fail(failure(pb.FAILURE_CODE_NO_ROOM)) is not None
    assert (load.full, load.blocks_free, len(table)) == (True, 10, 0)


def test_after_failed_kv_the_reservation_stays() -> None:
    span = RecordedSpan()
    table, load = decode_table(span)
    assert table.fail(failure(pb.FAILURE_CODE_KV_FAILED)) is table.get(b"d") is not None
    assert (load.blocks_free, span.ends) == (7, [])


def test_an_unknown_failure_code_becomes_unspecified() -> None:
    table, _ = decode_table(RecordedSpan())
    failed = failure(cast("pb.FailureCode", 99))
    assert table.fail(failed) is not None
    assert failed.code == pb.FAILURE_CODE_UNSPECIFIED
    assert "99" in failed.message


@pytest.mark.parametrize("code", [pb.FAILURE_CODE_ENGINE, pb.FAILURE_CODE_KV_FAILED])
def test_a_failure_of_an_attempt_that_is_not_open_is_ignored(code: "pb.FailureCode") -> None:
    table, load = decode_table(RecordedSpan())
    assert table.fail(failure(code, b"other")) is None
    assert load.blocks_free == 7


def test_the_work_of_a_prefill_is_returned_once() -> None:
    span, table, work = RecordedSpan(), AttemptTable(), PrefillWork(100)
    added = attempt(span, 0, work)
    table.add(b"p", added)
    assert table.get(b"p") is added
    assert table.prefilled(added) is work
    assert table.prefilled(added) is None
    assert span.ends == [""]
    assert len(table) == 1, "the attempt is open until it ends"


def test_a_lost_stream_empties_the_table() -> None:
    span = RecordedSpan()
    table, _ = decode_table(span)
    assert list(table.lose_all()) == [b"d"]
    assert (len(table), table.load) == (0, None)
    assert span.ends == ["the worker was lost"]
