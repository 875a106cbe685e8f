"""The process of a rank from 1 on, of an engine that spans several devices: `python -m worker.rank_process`.

1. Read the configuration from stdin, and tie the process to its parent (`worker.child`).
2. Start together with the engine process, which is rank 0.
3. Follow rank 0 until it stops.
"""

import gc
import logging.config
import subprocess
import sys
from typing import Any

import msgspec

from engine import EngineConfig
from engine.execution.rank_files import RankFiles
from worker.child import begin
from worker.engine_start import EXIT_START_FAILED
from worker.processes import spawn


class RankProcessConfig(msgspec.Struct, frozen=True):
    """The configuration of the process of a rank: one JSON line on stdin."""

    name: str  # "decode 0 rank 1"
    title: str  # prefix of the process title
    parent_pid: int
    rank: int
    files: RankFiles  # inherited
    logging: dict[str, Any]  # for logging.config.dictConfig
    engine: EngineConfig


def spawn_rank(config: RankProcessConfig) -> subprocess.Popen[bytes]:
    """Starts the process. Must be called in the main thread, as `spawn`."""
    return spawn("worker.rank_process", msgspec.json.encode(config), pass_fds=config.files.fds)


def main() -> int:
    """Runs the process. Returns its exit code. With `EXIT_START_FAILED`, `files` has the reason."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankProcessConfig)
    begin(f"{config.title}: {config.name}", config.parent_pid)
    logging.config.dictConfig(config.logging)
    gc.disable()  # as in the engine process
    from engine.execution.rank import Follower  # imports torch

    try:
        follower = Follower(config.engine, config.rank, config.files)
    except ValueError as error:
        config.files.fail(str(error))
        return EXIT_START_FAILED
    gc.collect()
    gc.enable()
    gc.freeze()
    follower.run(lambda step: lambda layer: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
