"""The engine process of a decode worker. Its service runs `python -m decode_worker.engine_process`."""

import sys

from worker.engine_start import EngineProcessConfig, start


def run(config: EngineProcessConfig) -> int:
    # These imports load torch, which is slow. The process must be tied to its parent before.
    from decode_worker.role import DecodeRole
    from worker import engine_loop

    return engine_loop.run(config, DecodeRole)


if __name__ == "__main__":
    sys.exit(start(run))
