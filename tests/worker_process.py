"""A worker whose configuration comes on stdin, as JSON: `python -m tests.worker_process`."""

import json
import sys

from engine import EngineConfig
from worker import Deadlines, WorkerConfig
from worker.service_process.service import run

if __name__ == "__main__":
    given = json.load(sys.stdin)
    config = WorkerConfig(
        engine=EngineConfig(**given.pop("engine")),
        deadlines=Deadlines(**given.pop("deadlines")),
        secret=given.pop("secret").encode(),
        **given,
    )
    sys.exit(run(config))
