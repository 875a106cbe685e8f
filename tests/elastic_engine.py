"""The engine process of a worker with so little memory for states and KV that it must move between them.

It runs by `python -m tests.elastic_engine`.
"""

from baton.cluster.engine_process import run
from baton.worker.engine_process.start import EngineProcessConfig, start

ROOM = 800_000

if __name__ == "__main__":
    from baton.engine.execution import elastic_cache, memory_sizing

    memory_sizing.CPU_POOL_BYTES = ROOM
    elastic_cache.RESIDENT_SHARE = 3  # so that a slot of a small model is a unit
    start(EngineProcessConfig, run)
