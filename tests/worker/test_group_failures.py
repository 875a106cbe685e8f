"""Each rank of each side dies or hangs at each state of a handover between unequal groups."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.engine import Engine, EngineConfig, build_engine
from tests.cluster_helpers import ENGINE, WorkerProcess, start_worker, tiny_model
from tests.device import DEVICE

from .group_failures import Failure, Side, State, tokens_despite
from .test_ranks import SHORT_STEPS, alone

pytestmark = [pytest.mark.long, pytest.mark.skipif(DEVICE != "cpu", reason="needs several devices")]

SIZES: dict[Side, int] = {"prefill": 2, "decode": 4}
STATES: tuple[State, ...] = ("queued", "streaming", "committed", "decoding")
FAILURES = [
    Failure(side, rank, state, how)
    for side, size in SIZES.items()
    for rank in range(size)
    for state in STATES
    for how in (signal.SIGKILL, signal.SIGSTOP)
]
WORKERS = {
    "prefill": SHORT_STEPS | {"tensor_parallel_size": SIZES["prefill"]},
    "decode": SHORT_STEPS | {"tensor_parallel_size": SIZES["decode"], "block_size": 64},
    "spare": SHORT_STEPS | {"tensor_parallel_size": 1, "block_size": 32},
}
LENGTH = 3600
Workers = tuple[WorkerProcess, WorkerProcess, WorkerProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    engine: Engine = build_engine(EngineConfig(str(model), load_format="dummy", **ENGINE))
    return alone(engine, LENGTH)


@pytest.fixture(scope="module")
def alive(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Workers]]:
    """Gives the three workers. It starts again those that have ended."""
    directory = tmp_path_factory.mktemp("groups")
    started: dict[str, WorkerProcess] = {}

    def workers() -> Workers:
        ended = [name for name in WORKERS if name not in started or started[name].popen.poll() is not None]
        for name in ended:
            started[name] = start_worker(
                "decode", model, directory / name, engine=WORKERS[name],
                deadlines={"engine_dead": 3.0, "fetch_wait": 10.0, "hold": 10.0, "peer_dead": 3.0},
            )  # fmt: skip
        for name in ended:
            started[name].wait_ready()
        return started["prefill"], started["decode"], started["spare"]

    yield workers
    for worker in started.values():
        worker.popen.kill()
        worker.popen.wait()


@pytest.mark.parametrize(
    "failure", FAILURES, ids=lambda x: f"{x.side}-{x.kind}-{x.state}-{x.how.name}".replace(" ", "-")
)
async def test_the_request_goes_on(
    failure: Failure, alive: Callable[[], Workers], expected: list[int]
) -> None:
    workers = alive()
    try:
        assert await tokens_despite(failure, *workers, length=LENGTH) == expected
    finally:
        workers[list(SIZES).index(failure.side)].popen.kill()  # if the test has failed
