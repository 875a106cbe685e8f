"""The engine process of a worker whose standbys have their weights in another layout than the engine that
serves, as of a new version of Baton. There is no room for two copies.

It runs by `python -m tests.worker.other_layout_engine`.
"""

from baton.cluster import engine_process
from baton.worker.engine_process.start import EngineProcessConfig, start
from tests.worker.held_engine import hold_requests


def run(config: EngineProcessConfig) -> int:
    from baton.engine.execution import shared_weights

    if config.standby:
        shared_weights._COUNT_BYTES *= 2
        shared_weights.MOST_APART = 0
    return engine_process.run(config)


if __name__ == "__main__":
    hold_requests()
    start(EngineProcessConfig, run)
