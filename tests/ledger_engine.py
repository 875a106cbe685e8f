"""The engine process of a worker that knows the kinds of cache of `tests.ledger`. Its other processes do not.

It runs by `python -m tests.ledger_engine`.
"""

from baton.cluster.engine_process import run
from baton.worker.engine_process.start import EngineProcessConfig, start

if __name__ == "__main__":
    from tests.ledger import register

    register()
    start(EngineProcessConfig, run)
