"""The start of an engine process, before the slow imports.

1. Read the configuration from stdin.
2. Tie the process to its parent (`child`).
3. Run the role, which imports torch.
"""

import gc
import logging.config
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.engine.execution.rank_files import RankFiles
from baton.worker.engine_process.child import begin

EXIT_START_FAILED = 2
"""Exit code of an engine process that has sent a StartFailed with the reason."""
EXIT_TRANSFER_GONE = 4
"""The same if its transfer process ended before it."""


class EngineProcessConfig(msgspec.Struct, frozen=True):
    """The configuration of an engine process: one JSON line on stdin.

    `engine` stays encoded, because decoding needs the engine package, which imports torch.
    """

    name: str  # "prefill 0 engine"
    title: str  # prefix of the process title
    parent_pid: int
    incarnation: int
    address: str  # of the service's socket
    sending_fds: Sequence[int]  # inherited, as `ArenaEnd.fds` of the engine's ends
    receiving_fds: Sequence[int]
    offload_fds: Sequence[Sequence[int]]  # inherited: to each other rank, one for each tier
    disk_cache_dir: str | None
    heartbeat_fd: int  # inherited
    exports: bool  # as in `Transport`, and the next
    adopts: bool
    kv_slots: int
    kv_slot_bytes: int
    trace_path: str | None
    logging: dict[str, Any]  # for logging.config.dictConfig
    engine: msgspec.Raw  # engine.EngineConfig
    ranks: RankFiles | None  # inherited; None: the engine has one rank


def start(run: Callable[[EngineProcessConfig], int]) -> int:
    """Runs an engine process. Returns its exit code, which is that of `run`. `run` may import torch."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineProcessConfig)
    begin(f"{config.title}: {config.name}", config.parent_pid)
    logging.config.dictConfig(config.logging)
    gc.disable()  # until the engine is built: imports make no garbage, and collection slows them by a fifth
    return run(config)
