"""The table of attempts in the engine process."""

import pytest

from baton.decode_worker.role import DecodeRole
from baton.engine import Logprobs, Output
from baton.kv_transfer import TraceWriter
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process import to_routers
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.engine_attempt import Resources
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.messages import FromEngine, Origin
from tests.router_messages import submit_decode, tokens_told, told, work
from tests.stand_in import stand_in


class Table:
    """Three attempts: two of the router of stream 1, then one of that of stream 2."""

    def __init__(self) -> None:
        self.sent: list[FromEngine] = []
        self.table = AttemptTable[Attempt](self.sent.append)
        self.a, self.b, self.c = made = [attempt(b"a", 1), attempt(b"b", 1), attempt(b"c", 2)]
        for each in made:
            assert self.table.open(each)


def attempt(name: bytes, stream: int) -> Attempt:
    return Attempt(stream=stream, origin=Origin(name * 16, "r", "", 0.0), tokens=1)


@pytest.fixture
def of() -> Table:
    return Table()


def test_tokens_of_a_step_are_one_message_per_router_and_its_reports_follow(of: Table) -> None:
    report = messages.Decoded(of.a.origin, 1.0, 2.0, 3)
    of.table.report(report)
    for each in (of.a, of.c, of.b):
        of.table.token(each, Output(each.id, 0, 7))
    assert of.sent == []
    of.table.flush_tokens()
    assert [
        (m.stream, [t.attempt_id for t in tokens_told([m])])
        for m in of.sent
        if isinstance(m, messages.ToRouter)
    ] == [
        (1, [of.a.id, of.b.id]),
        (2, [of.c.id]),
    ]
    more = Output(of.a.id, 1, 7)
    of.table.token(of.a, more)
    of.table.flush()
    assert [(t.attempt_id, t.output_index) for t in tokens_told(of.sent[2:])] == [(of.a.id, 1)]
    assert of.sent[3:] == [report]
    of.table.flush()
    assert len(of.sent) == 4, "nothing is sent twice, and no message is empty"


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_an_attempt_that_ended_sends_no_messages(of: Table, how: str) -> None:
    if how == "cancelled":
        of.table.cancelled(of.a)
    else:
        of.table.fail(of.a, pb.FAILURE_CODE_HANDED_BACK, "why")
    of.table.flush()
    code = pb.FAILURE_CODE_HANDED_BACK
    ends: dict[str, list[FromEngine]] = {
        "cancelled": [messages.Cancelled(of.a.origin)],
        "failed": [
            to_routers.failed(1, of.a.id, code, "why"), messages.Failed(of.a.origin, code, "why"),
        ],
    }  # fmt: skip
    assert of.sent == ends[how]
    of.table.token(of.a, Output(of.a.id, 0, 7))
    of.table.reserved(of.a)
    of.table.prefill_started(of.a)
    for code in (pb.FAILURE_CODE_ENGINE, pb.FAILURE_CODE_KV_FAILED):
        of.table.fail(of.a, code, "late")
    of.table.flush()
    assert of.sent == ends[how]
    assert of.table.find(of.a.id) is of.a, "its blocks may still be in use"


def test_a_failure_is_sent_after_the_tokens_before_it(of: Table) -> None:
    of.table.token(of.a, Output(of.a.id, 0, 7, Logprobs(-1.0, (7,), (-1.0,))))
    of.table.fail_all(pb.FAILURE_CODE_DRAINING, "why")
    assert [m.WhichOneof("kind") for m in told(of.sent)] == ["step", *["failed"] * 3]


def test_an_attempt_goes_on_when_its_kv_failed(of: Table) -> None:
    of.table.fail(of.a, pb.FAILURE_CODE_KV_FAILED, "gone", of.c.id)
    assert of.sent == [to_routers.failed(1, of.a.id, pb.FAILURE_CODE_KV_FAILED, "gone", of.c.id)]
    assert of.a.stream == 1


def test_an_id_in_use_is_refused(of: Table) -> None:
    """The engine does not know a prefill that waits for a prefix of another worker. It would get two requests
    with one id."""
    shared = stand_in(Resources, receiver=None, attempts=of.table, trace=TraceWriter(None, ""), incarnation=1)
    role = DecodeRole(shared, stand_in(PrefixFetches))
    again = attempt(b"a", 2).origin
    message = submit_decode(2, work(again.attempt_id)._replace(origin=again), None)
    role.handle(message, pb.RouterMessage.FromString(message.data).decode)
    assert of.sent == [to_routers.failed(2, again.attempt_id, pb.FAILURE_CODE_INVALID, "this id is in use")]
    assert of.a.stream == 1
    assert of.table.find(again.attempt_id) is of.a
