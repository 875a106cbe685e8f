"""The engine process of a worker that computes nothing more once a request has as many tokens as its name
says (`held-at-100`). So its answer does not end before a test has replaced this engine process. The next one
goes on.

It runs by `python -m tests.worker.held_engine`.
"""

from baton.cluster.engine_process import run
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.engine_attempt import BatonResources, EngineAttempt
from baton.worker.engine_process.start import EngineProcessConfig, start

HELD_AT = "held-at-"


def hold_requests() -> None:
    flush = AttemptTable.flush

    def held(attempts: AttemptTable[EngineAttempt]) -> None:
        named = [attempt for attempt in attempts if _is_held(attempt)]
        if named and all(each.num_sampled >= _count(each) for each in named):
            shared = named[0].shared
            assert isinstance(shared, BatonResources)
            shared.engine.loop.frozen = True
        flush(attempts)

    AttemptTable.flush = held  # pyrefly: ignore[bad-assignment]  (each attempt is one of Baton's engine)


def _is_held(attempt: EngineAttempt) -> bool:
    return (
        attempt.origin.name.startswith(HELD_AT)
        and attempt.live is not None
        and not attempt.live_request.request.retried
    )


def _count(attempt: EngineAttempt) -> int:
    return int(attempt.origin.name.removeprefix(HELD_AT))


if __name__ == "__main__":
    hold_requests()
    start(EngineProcessConfig, run)
