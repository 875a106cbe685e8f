"""The engine process of a prefill worker. Its service runs `python -m prefill_worker.engine_process`."""

import sys

from worker.engine_start import EngineProcessConfig, start


def run(config: EngineProcessConfig) -> int:
    # These imports load torch, which is slow. The process must be tied to its parent before.
    from prefill_worker.role import PrefillRole
    from worker import engine_loop

    return engine_loop.run(config, PrefillRole)


if __name__ == "__main__":
    sys.exit(start(run))
