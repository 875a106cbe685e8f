"""A worker whose configuration comes on stdin, as JSON: `python -m tests.worker_process`."""

import json
import sys

from baton.engine import EngineConfig
from baton.kv_transfer import TransferDeadlines
from baton.worker import WorkerConfig
from baton.worker.service_process.service import run

if __name__ == "__main__":
    given = {"engine_module": "baton.cluster.engine_process"} | json.load(sys.stdin)
    config = WorkerConfig(
        engine=EngineConfig(**given.pop("engine")),
        deadlines=TransferDeadlines(**given.pop("deadlines")),
        secret=given.pop("secret").encode(),
        **given,
    )
    sys.exit(run(config))
