"""The engine process of a worker that fetches all KV that the store has, however long that takes. So what it
fetches does not depend on the speed of the machine.

It runs by `python -m tests.worker.eager_engine`.
"""

from baton.cluster.engine_process import run
from baton.engine import Engine
from baton.worker.engine_process.shared_store import StoreSource
from baton.worker.engine_process.start import EngineProcessConfig, start
from tests.within import WITHIN


def not_known(self: Engine, tokens: int, uncached: int, position: int) -> float:
    return 0.0


def patient(self: StoreSource, expected: float, computing: float) -> float:
    return WITHIN


if __name__ == "__main__":
    Engine.prompt_seconds = not_known
    StoreSource.limit = patient
    start(EngineProcessConfig, run)
