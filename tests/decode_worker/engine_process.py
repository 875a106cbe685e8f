"""The engine process of a worker that fetches all KV that it lacks.

It runs by `python -m tests.decode_worker.engine_process`. On a busy machine a fetch may take longer than to
compute the KV of the tiny model. Then a worker would compute it, and tests would find nothing fetched.
`tests/worker/test_prefix_fetches.py` tests that choice.
"""

from baton.cluster.engine_process import run
from baton.engine.core.link import Link
from baton.worker.engine_process.start import EngineProcessConfig, start


def pays(self: Link, tokens: int, seconds: float, now: float) -> bool:
    return now >= self.paused_until


if __name__ == "__main__":
    Link.pays = pays
    start(EngineProcessConfig, run)
