"""What the service process remembers of attempts, for the next engine process."""

import time
from typing import Any

import pytest

from baton.engine import EngineRequest, Image, Output, PromptLogprobs
from baton.worker import messages
from baton.worker.engine_process import to_routers
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.to_routers import StepTokens
from baton.worker.messages import Code, Decode, Origin, PlanRange, Prefill, PrefillSource, Work
from baton.worker.service_process.open_attempts import OpenAttempts
from tests.router_messages import tokens_told

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))
SOURCE = PrefillSource(B, "127.0.0.1:1", 7, 1)


def work(attempt_id: bytes, timeout: float = 60.0, **request: Any) -> Work:
    asked = EngineRequest(attempt_id, [1, 2, 3], **request)
    return Work(asked, timeout, Origin(attempt_id, "name", "", time.monotonic()))


def decode(attempt_id: bytes = A, source: PrefillSource | None = None, **request: Any) -> Decode:
    return Decode(1, work(attempt_id, **request), source, messages.ContentSource("127.0.0.1:1", 7))


def prefill(attempt_id: bytes = A, *, handover: bool = True, **fields: Any) -> Prefill:
    return Prefill(1, work(attempt_id), handover, **fields)


def tokens(attempt_id: bytes, *values: int, first: int = 0, end: str = "") -> messages.ToRouter:
    step = StepTokens()
    for i, value in enumerate(values):
        last = value == values[-1]
        step.add(Output(attempt_id, first + i, value, finish_reason=end if last else ""), 0)
    return step.to(1)


@pytest.fixture
def open_attempts() -> OpenAttempts:
    return OpenAttempts(hold=60.0)


def test_a_decode_goes_on_with_prompt_and_output(open_attempts: OpenAttempts) -> None:
    open_attempts.sent(decode(A, SOURCE, output_ids=[9]))
    open_attempts.sent(decode(C))
    open_attempts.heard(tokens(A, 10, 11, first=1))
    open_attempts.heard(tokens(A, 11, first=2))  # again
    assert open_attempts.lost([A], "it died") == []
    first, second = open_attempts.again()
    assert isinstance(first, Decode)
    assert first.work.request.output_ids == [9, 10, 11]
    assert first.source is None, "all KV was here"
    assert first.content is None
    assert first.work.request.retried
    assert not first.work.request.alone
    assert 59 < first.work.timeout < 60, "the deadline stays"
    assert second.work.request.id == C
    assert second.content is not None, "nothing of it is here"


def test_what_an_engine_before_has_computed_does_not_count_as_cached(open_attempts: OpenAttempts) -> None:
    """Unless a router knows already how much was cached. One that comes between two engines was in none."""
    for each in (decode(A), prefill(B)):
        open_attempts.sent(each)
    open_attempts.heard(tokens(A, 5))
    assert open_attempts.lost([B], "it died") == []
    open_attempts.sent(decode(C))
    sent: list[messages.FromEngine] = []
    table = AttemptTable[Attempt](sent.append)
    for each in open_attempts.again():
        attempt = Attempt(stream=1, origin=each.work.origin, tokens=3)
        table.token(attempt, Output(attempt.id, 0, 5, cached_tokens=64))
    table.flush()
    assert [token.cached_tokens for token in tokens_told(sent)] == [64, 0, 64]


def test_a_decode_without_kv_fetches_again_from_its_last_source(open_attempts: OpenAttempts) -> None:
    open_attempts.sent(decode(A, SOURCE))
    other = PrefillSource(C, "127.0.0.1:2", 8, 2)
    open_attempts.sent(messages.Retarget(2, A, other, [4]))  # of another router
    open_attempts.sent(messages.Retarget(1, A, other, [4, 5]))
    failed = messages.AttemptFailed(1, work(A).origin, Code.KV_FAILED, "", B)
    open_attempts.heard(failed)
    assert open_attempts.lost([], "it died") == []
    (again,) = open_attempts.again()
    assert isinstance(again, Decode)
    assert again.source == other
    assert again.work.request.output_ids == [4, 5]


def test_what_has_ended_is_forgotten(open_attempts: OpenAttempts) -> None:
    ends = [
        tokens(A, 1, end="stop"),
        messages.AttemptFailed(1, work(A).origin, Code.NO_ROOM, "", b""),
    ]
    for end in ends:
        open_attempts.sent(decode(A))
        open_attempts.heard(end)
        assert not len(open_attempts)
    for cancel in (messages.Cancel(1, A), messages.Cancel(1)):
        open_attempts.sent(decode(A))
        open_attempts.sent(messages.Cancel(2, cancel.attempt_id))  # of another router
        assert len(open_attempts) == 1
        open_attempts.sent(cancel)
        assert not len(open_attempts)
    open_attempts.sent(prefill(A, handover=False))
    open_attempts.heard(tokens(A, 1))
    assert not len(open_attempts), "its only token came"


def test_what_another_worker_may_have_read_goes_back_to_the_router(open_attempts: OpenAttempts) -> None:
    part = PlanRange(A, "127.0.0.1:1", 7, 0, 2)
    image = Image(b"i" * 32, 0, 1, 2)
    scored = PromptLogprobs(B, 1, b"", b"", b"", b"")
    for attempt, heard in (
        (prefill(A), tokens(A, 5)),
        (prefill(A, plan=(part,)), to_routers.prefill_started(1, A)),
        (decode(A, SOURCE, images=(image,)), tokens(A, 5)),
        (decode(B), to_routers.scored(1, scored)),
        (decode(A, timeout=0.0), to_routers.reserved(1, A)),
    ):
        open_attempts.sent(attempt)
        open_attempts.heard(heard)
        (lost,) = open_attempts.lost([], "it died")
        assert (lost.stream, lost.attempt_id, lost.code) == (1, attempt.work.request.id, Code.HANDED_BACK)
        assert not len(open_attempts)
    open_attempts.sent(prefill(A))
    open_attempts.sent(decode(B, SOURCE, images=(image,)))
    assert open_attempts.lost([], "it died") == [], "the prefill is computed, and its KV is fetched"
    assert len([*open_attempts.again()]) == 2


def test_the_third_crashed_step_is_the_end_of_an_attempt(open_attempts: OpenAttempts) -> None:
    open_attempts.sent(decode(A))
    open_attempts.sent(decode(B))
    for alone in (False, True):
        assert open_attempts.lost([A], "it died") == []
        assert [each.work.request.alone for each in open_attempts.again()] == [alone, False]
    (lost,) = open_attempts.lost([A, B], "it died")
    assert (lost.attempt_id, lost.code) == (A, Code.ENGINE)
    assert len(open_attempts) == 1


def test_prefills_that_were_handed_over_are_forgotten_in_time() -> None:
    """A router cancels none that was acknowledged."""
    open_attempts = OpenAttempts(hold=0.0)
    for i in range(1000):
        attempt_id = i.to_bytes(16)
        open_attempts.sent(prefill(attempt_id))
        open_attempts.heard(tokens(attempt_id, 5))
    assert len(open_attempts) <= 1


def test_a_token_shows_that_a_crash_was_not_of_the_attempt(open_attempts: OpenAttempts) -> None:
    """So any number of kills ends no stream."""
    open_attempts.sent(decode(A))
    for index in range(5):
        for alone in (False, True):
            assert open_attempts.lost([A], "it died") == []
            [again] = open_attempts.again()
            assert again.work.request.alone == alone
        open_attempts.heard(tokens(A, 9, first=index))
    open_attempts.sent(decode(B, alone=True))
    open_attempts.lost([], "it died")
    assert [each.work.request.alone for each in open_attempts.again()] == [False, True], "as its router says"
