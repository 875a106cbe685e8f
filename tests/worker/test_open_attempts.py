"""What the service process remembers of attempts, for the next engine process."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from baton.engine import Image, Output, PromptLogprobs
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process import to_routers
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.to_routers import StepTokens
from baton.worker.messages import FromRouter
from baton.worker.service_process.open_attempts import OpenAttempts
from tests.router_messages import (
    Asked,
    cancel,
    content_at,
    failures_told,
    planned,
    retarget,
    source,
    submit_decode,
    submit_prefill,
    tokens_told,
    work,
)

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))
SOURCE = source(B)
Sent = tuple[FromRouter, pb.RouterMessage]


def decode(attempt_id: bytes = A, source: pb.PrefillSource | None = None, **how: Any) -> Sent:
    return sent(submit_decode(1, asked(attempt_id, **how), source, content_at()))


def prefill(attempt_id: bytes = A, handover: bool = True, **fields: Any) -> Sent:
    return sent(submit_prefill(1, asked(attempt_id), handover, **fields))


def asked(
    attempt_id: bytes, images: Sequence[Image] = (), alone: bool = False, timeout_ms: int = 60_000, **how: Any
) -> Asked:
    made = work(attempt_id, 3, **how).show(images)
    made.request.alone, made.request.timeout_ms = alone, timeout_ms
    return made


def sent(message: FromRouter) -> Sent:
    return message, pb.RouterMessage.FromString(message.data)


def read(again: Iterable[FromRouter]) -> list[pb.RouterMessage]:
    return [pb.RouterMessage.FromString(each.data) for each in again]


def tokens(attempt_id: bytes, *values: int, first: int = 0, end: str = "") -> messages.ToRouter:
    step = StepTokens()
    for i, value in enumerate(values):
        last = value == values[-1]
        step.add(Output(attempt_id, first + i, value, finish_reason=end if last else ""), tell_cached=True)
    return messages.ToRouter(1, step.message.SerializeToString())


@pytest.fixture
def open_attempts() -> OpenAttempts:
    return OpenAttempts(hold=60.0)


def test_a_decode_goes_on_with_prompt_and_output(open_attempts: OpenAttempts) -> None:
    open_attempts.said(*decode(A, SOURCE, output_ids=[9]))
    open_attempts.said(*decode(C))
    open_attempts.heard(tokens(A, 10, 11, first=1))
    open_attempts.heard(tokens(A, 11, first=2))  # again
    assert open_attempts.lost([A], "it died") == []
    first, second = [each.decode for each in read(open_attempts.again())]
    assert first.request.output_ids == [9, 10, 11]
    assert not first.HasField("source"), "all KV was here"
    assert not first.HasField("content")
    assert first.request.retried
    assert not first.request.alone
    assert 59_000 < first.request.timeout_ms < 60_000, "the deadline stays"
    assert second.decode_id == C
    assert second.HasField("content"), "nothing of it is here"


def test_what_an_engine_before_has_computed_does_not_count_as_cached(open_attempts: OpenAttempts) -> None:
    """Unless a router knows already how much was cached. One that comes between two engines was in none."""
    for each in (decode(A), prefill(B)):
        open_attempts.said(*each)
    open_attempts.heard(tokens(A, 5))
    assert open_attempts.lost([B], "it died") == []
    open_attempts.said(*decode(C))
    sent: list[messages.FromEngine] = []
    table = AttemptTable[Attempt](sent.append)
    for each in open_attempts.again():
        assert each.origin is not None
        attempt = Attempt(stream=1, origin=each.origin, tokens=3)
        table.token(attempt, Output(attempt.id, 0, 5, cached_tokens=64))
    table.flush()
    assert [token.cached_tokens for token in tokens_told(sent)] == [64, 0, 64]


def test_a_decode_without_kv_fetches_again_from_its_last_source(open_attempts: OpenAttempts) -> None:
    open_attempts.said(*decode(A, SOURCE))
    other = source(C, 8, 2)
    open_attempts.said(*sent(retarget(2, A, other, [4])))  # of another router
    open_attempts.said(*sent(retarget(1, A, other, [4, 5])))
    failed = to_routers.failed(1, A, pb.FAILURE_CODE_KV_FAILED, "", B)
    open_attempts.heard(failed)
    assert open_attempts.lost([], "it died") == []
    [again] = read(open_attempts.again())
    assert again.decode.source == other
    assert again.decode.request.output_ids == [4, 5]


def test_what_has_ended_is_forgotten(open_attempts: OpenAttempts) -> None:
    ends = [
        tokens(A, 1, end="stop"),
        to_routers.failed(1, A, pb.FAILURE_CODE_NO_ROOM, "", b""),
    ]
    for end in ends:
        open_attempts.said(*decode(A))
        open_attempts.heard(end)
        assert not len(open_attempts)
    open_attempts.said(*decode(A))
    open_attempts.said(*sent(cancel(2, A)))  # of another router
    open_attempts.detached(2)
    assert len(open_attempts) == 1
    open_attempts.said(*sent(cancel(1, A)))
    assert not len(open_attempts)
    open_attempts.said(*decode(A))
    open_attempts.detached(1)
    assert not len(open_attempts)
    open_attempts.said(*prefill(A, handover=False))
    open_attempts.heard(tokens(A, 1))
    assert not len(open_attempts), "its only token came"


def test_what_another_worker_may_have_read_goes_back_to_the_router(open_attempts: OpenAttempts) -> None:
    [part] = planned((A, 7, 0, 2))
    image = Image(b"i" * 32, 0, 1, 2, b"")
    scored = PromptLogprobs(B, 1, b"", b"", b"", b"")
    for attempt, heard in (
        (prefill(A), tokens(A, 5)),
        (prefill(A, plan=(part,)), to_routers.prefill_started(1, A)),
        (decode(A, SOURCE, images=(image,)), tokens(A, 5)),
        (decode(B), to_routers.scored(1, scored)),
        (decode(A, timeout_ms=0), to_routers.reserved(1, A)),
    ):
        open_attempts.said(*attempt)
        message, _ = attempt
        assert message.origin is not None
        open_attempts.heard(heard)
        (lost,) = open_attempts.lost([], "it died")
        [failure] = failures_told([lost])
        assert (lost.stream, failure.attempt_id) == (1, message.origin.attempt_id)
        assert failure.code == pb.FAILURE_CODE_HANDED_BACK
        assert not len(open_attempts)
    open_attempts.said(*prefill(A))
    open_attempts.said(*decode(B, SOURCE, images=(image,)))
    assert open_attempts.lost([], "it died") == [], "the prefill is computed, and its KV is fetched"
    assert len([*open_attempts.again()]) == 2


def test_the_third_crashed_step_is_the_end_of_an_attempt(open_attempts: OpenAttempts) -> None:
    open_attempts.said(*decode(A))
    open_attempts.said(*decode(B))
    for alone in (False, True):
        assert open_attempts.lost([A], "it died") == []
        assert [each.decode.request.alone for each in read(open_attempts.again())] == [alone, False]
    [failure] = failures_told(open_attempts.lost([A, B], "it died"))
    assert (failure.attempt_id, failure.code) == (A, pb.FAILURE_CODE_ENGINE)
    assert len(open_attempts) == 1


def test_prefills_that_were_handed_over_are_forgotten_in_time() -> None:
    """A router cancels none that was acknowledged."""
    open_attempts = OpenAttempts(hold=0.0)
    for i in range(1000):
        attempt_id = i.to_bytes(16)
        open_attempts.said(*prefill(attempt_id))
        open_attempts.heard(tokens(attempt_id, 5))
    assert len(open_attempts) <= 1


def test_a_token_shows_that_a_crash_was_not_of_the_attempt(open_attempts: OpenAttempts) -> None:
    """So any number of kills ends no stream."""
    open_attempts.said(*decode(A))
    for index in range(5):
        for alone in (False, True):
            assert open_attempts.lost([A], "it died") == []
            [again] = read(open_attempts.again())
            assert again.decode.request.alone == alone
        open_attempts.heard(tokens(A, 9, first=index))
    open_attempts.said(*decode(B, alone=True))
    open_attempts.lost([], "it died")
    assert [each.decode.request.alone for each in read(open_attempts.again())] == [False, True], (
        "as its router says"
    )
