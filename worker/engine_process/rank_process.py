"""The process of a rank from 1 on, of an engine that spans several devices.

Its service runs `python -m baton.worker.engine_process.rank_process`.

1. Read the configuration from stdin, and tie the process to its parent (`child`).
2. Start together with the engine process, which is rank 0.
3. Follow rank 0 until it stops. Threads copy KV between this rank's cache and the arenas meanwhile.
"""

import gc
import logging.config
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.engine import EngineConfig
from baton.engine.execution.rank_files import RankFiles
from baton.kv_transfer import ArenaEnd
from baton.worker.engine_process.child import begin, end
from baton.worker.engine_process.start import EXIT_START_FAILED
from baton.worker.processes import spawn


class RankArenas(msgspec.Struct, frozen=True):
    """The arenas of a worker, as one of its ranks inherits them."""

    sending_fds: Sequence[int]  # as `ArenaEnd.fds` of the rank's ends
    receiving_fds: Sequence[int]
    num_slots: int
    slot_bytes: int
    exports: bool
    """As in `Transport`, and the next."""
    adopts: bool


class RankProcessConfig(msgspec.Struct, frozen=True):
    """The configuration of the process of a rank: one JSON line on stdin."""

    name: str  # "decode 0 rank 1"
    title: str  # prefix of the process title
    parent_pid: int
    rank: int
    files: RankFiles  # inherited
    logging: dict[str, Any]  # for logging.config.dictConfig
    engine: EngineConfig
    arenas: RankArenas | None  # None: the engine hands over no KV
    offload_fds: Sequence[int] = ()  # inherited: to rank 0, one for each tier below the device


def spawn_rank(config: RankProcessConfig) -> subprocess.Popen[bytes]:
    """Starts the process. Must be called in the main thread, as `spawn`."""
    fds = tuple(config.files.fds)
    if config.arenas is not None:
        fds += (*config.arenas.sending_fds, *config.arenas.receiving_fds)
    fds += tuple(config.offload_fds)
    return spawn("baton.worker.engine_process.rank_process", msgspec.json.encode(config), pass_fds=fds)


def _nothing(layer: int) -> None:
    pass


def main() -> int:
    """Runs the process. Returns its exit code. With `EXIT_START_FAILED`, `files` has the reason."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankProcessConfig)
    begin(f"{config.title}: {config.name}", config.parent_pid)
    logging.config.dictConfig(config.logging)
    gc.disable()  # as in the engine process
    # These import torch.
    from baton.engine.execution.rank import Follower
    from baton.kv_transfer.endpoint.rank_copier import RankCopier
    from baton.worker.engine_process.offload import serve_offload
    from baton.worker.engine_process.paged_kv import paged_kv

    gc.freeze()  # as in the engine process
    try:
        follower = Follower(config.engine, config.rank, config.files)
    except ValueError as error:
        config.files.fail(str(error))
        return EXIT_START_FAILED
    layer_done = _nothing
    if (arenas := config.arenas) is not None:
        sending, receiving = (
            ArenaEnd.inherited(fds, arenas.num_slots, arenas.slot_bytes)
            for fds in (arenas.sending_fds, arenas.receiving_fds)
        )
        copier = RankCopier(
            paged_kv(follower), sending, receiving, exports=arenas.exports, adopts=arenas.adopts
        )
        layer_done = copier.layer_done
    serve_offload(config.engine, follower, config.offload_fds)
    gc.collect()
    gc.enable()
    gc.freeze()
    follower.run(lambda step: layer_done if step.hands_over else _nothing)
    return 0


if __name__ == "__main__":
    end(main())
