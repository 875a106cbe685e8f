"""An engine with several ranks, without a worker: rank 0 is this process, the others are its children."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.execution.rank_files import RankFiles
from baton.rpc import logs
from baton.worker.engine_process.rank_process import RankProcessConfig, spawn_rank


@contextmanager
def running(config: EngineConfig) -> Iterator[Engine]:
    """Builds the engine. In the end it is closed, and its other ranks have ended."""
    size = config.tensor_parallel_size
    files = RankFiles.create(size) if size > 1 else None
    children = []
    try:
        for rank in range(1, size):
            assert files is not None
            log = logs.log_config("text", "warning", {"process": f"rank {rank}"})
            start = RankProcessConfig(f"rank {rank}", "baton", os.getpid(), rank, files, log, config, None)
            children.append(spawn_rank(start))
        engine = build_engine(config, files=files)
        yield engine
        engine.close()
        assert [child.wait(30) for child in children] == [0] * len(children), "a rank failed"
    finally:
        for child in children:
            child.kill()
            child.wait()
        if files is not None:
            files.close()
