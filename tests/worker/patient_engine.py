"""The engine process of a worker whose steps wait as long as it takes for KV that other workers compute.

It runs by `python -m tests.worker.patient_engine`.
"""

from baton.cluster.engine_process import run
from baton.prefill_worker import parts
from baton.worker.engine_process.start import EngineProcessConfig, start

if __name__ == "__main__":
    parts.STEP_WAIT = 1e6  # seconds
    start(EngineProcessConfig, run)
