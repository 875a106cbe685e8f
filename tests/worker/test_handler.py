"""What every engine process does with messages of its service process."""

import pytest

from baton.worker import messages
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.handler import Handler
from baton.worker.messages import FromEngine, Origin, ToEngine
from tests.router_messages import cancel, failures_told

A, B = b"a" * 16, b"b" * 16


class Engine:
    """It can do nothing. It has an attempt of each of two routers."""

    def __init__(self) -> None:
        self.sent: list[FromEngine] = []
        self.attempts = AttemptTable[Attempt](self.sent.append)
        self.handler = Handler(self.attempts, self.sent.append, "an engine")
        for stream, attempt_id in ((1, A), (2, B)):
            assert self.attempts.open(
                Attempt(stream=stream, origin=Origin(attempt_id, "r", "", 0.0), tokens=1)
            )

    @property
    def open(self) -> list[bytes]:
        return [attempt.id for attempt in self.attempts]


def test_the_last_message_follows_all_that_is_said_of_attempts() -> None:
    engine = Engine()
    assert not engine.handler.handle(messages.Stop())
    assert [failure.attempt_id for failure in failures_told(engine.sent)] == [A, B]
    told = [messages.ToRouter] * 2 + [messages.Failed] * 2  # routers do not wait for reports
    assert [type(each) for each in engine.sent] == [*told, messages.Stopped]


@pytest.mark.parametrize(
    ("message", "left"),
    [
        (cancel(1, A), [B]),
        (cancel(2, A), [A, B]),
        (messages.Detached(2), [A]),
        (messages.HandBack("why"), []),
    ],
)
def test_attempts_end_for_their_router_alone(message: ToEngine, left: list[bytes]) -> None:
    engine = Engine()
    assert engine.handler.handle(message)
    assert engine.open == left


def test_what_an_engine_cannot_do_is_refused_by_its_name() -> None:
    engine = Engine()
    for message in (
        messages.StageWeights(1, "path"),
        messages.DropWeights(),
        messages.SetMemory(2, True, []),
    ):
        assert engine.handler.handle(message)
    staged, memory = engine.sent
    assert isinstance(staged, messages.WeightsStaged)
    assert isinstance(memory, messages.MemorySet)
    assert (staged.question, memory.question) == (1, 2)
    assert staged.error == "an engine: its weights cannot be replaced; start the workers again"
    assert memory.error == "an engine: its memory cannot be released"
