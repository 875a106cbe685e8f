"""The table of attempts in the engine process."""

from types import SimpleNamespace
from typing import Any

from baton.decode_worker.role import DecodeRole
from baton.engine import EngineRequest, Logprobs, Output
from baton.kv_transfer import TraceWriter
from baton.worker import messages
from baton.worker.engine_process.attempts import Attempts
from baton.worker.messages import Code, FromEngine

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def attempts() -> tuple[Attempts, list[FromEngine]]:
    sent: list[FromEngine] = []
    table = Attempts(sent.append)
    table.open(1, A)
    table.open(1, B)
    table.open(2, C)
    return table, sent


def test_tokens_of_a_step_are_one_message_per_router() -> None:
    table, sent = attempts()
    for attempt in (A, C, B):
        table.token(Output(attempt, 0, 7))
    assert sent == []
    table.flush()
    assert [(m.stream, [t.id for t in m.tokens]) for m in sent if isinstance(m, messages.Tokens)] == [
        (1, [A, B]),
        (2, [C]),
    ]
    table.flush()
    assert len(sent) == 2, "no token is sent twice, and no message is empty"


def test_an_ended_attempt_sends_no_messages() -> None:
    table, sent = attempts()
    table.end(A)
    table.token(Output(A, 0, 7))
    table.fail(A, Code.ENGINE, "late")
    table.kv_failed(A, C, "late")
    table.prefill_started(A)
    table.flush()
    assert sent == []
    table.end(A)


def test_a_failure_ends_an_attempt_and_is_sent_after_its_tokens() -> None:
    table, sent = attempts()
    table.token(Output(A, 0, 7, Logprobs(-1.0, (7,), (-1.0,))))
    table.fail(A, Code.HANDED_BACK, "why")
    table.fail(A, Code.ENGINE, "twice")
    assert [type(m) for m in sent] == [messages.Tokens, messages.AttemptFailed]
    assert sent[1] == messages.AttemptFailed(1, A, Code.HANDED_BACK, "why")
    assert table.of(1) == [B]


def test_an_attempt_stays_open_when_its_kv_failed() -> None:
    table, sent = attempts()
    table.kv_failed(A, C, "gone")
    assert sent == [messages.AttemptFailed(1, A, Code.KV_FAILED, "gone", C)]
    assert table.owned(1, A)


def test_an_attempt_is_owned_by_the_stream_that_submitted_it() -> None:
    table, _ = attempts()
    assert table.owned(1, A)
    assert not table.owned(2, A)
    assert not table.owned(1, b"unknown")


def test_a_decode_may_not_have_the_id_of_a_prefill_that_the_engine_does_not_know_yet() -> None:
    """The prefill waits for a prefix of another worker. The engine would get two requests with one id."""
    table, sent = attempts()
    engine: Any = SimpleNamespace(has=lambda _: False)
    parts: Any = SimpleNamespace(
        attempts=table,
        counts=None,
        link=None,
        trace=TraceWriter(None, ""),
        config=SimpleNamespace(incarnation=1),
    )
    unused: Any = None
    role = DecodeRole(parts, engine, unused, unused, unused)
    work = messages.Work(EngineRequest(A, [1]), timeout=1.0, name="r", traceparent="")
    role.handle(messages.Decode(2, work, None))
    assert sent == [messages.AttemptFailed(2, A, Code.INVALID, "this id is in use")]
    assert table.owned(1, A)
    assert not role.owns(A)


def test_reports_of_a_step_follow_its_tokens_and_may_wait_for_more() -> None:
    table, sent = attempts()
    report = messages.Decoded(A, 1.0, 2.0, 3)
    table.report(report)
    tokens = [Output(A, index, 7) for index in range(2)]
    table.token(tokens[0])
    assert not sent
    table.flush_tokens()
    assert sent == [messages.Tokens(1, tokens[:1])]
    table.token(tokens[1])
    table.flush()
    assert sent[1:] == [messages.Tokens(1, tokens[1:]), report]
    table.flush()
    assert len(sent) == 3
