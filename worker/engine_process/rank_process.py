"""The process of a rank from 1 on, of an engine that spans several devices.

Its service runs `python -m baton.worker.engine_process.rank_process`.

1. Start together with the engine process, which is rank 0.
2. Follow rank 0 until it stops. Threads copy KV between this rank's cache and the arenas meanwhile.
"""

import gc
from collections.abc import Sequence
from functools import partial

from baton.kv_transfer.arena import Arena
from baton.worker.engine_process.start import EXIT_START_FAILED, RankProcessConfig, stand_by, start


def _nothing(layer: int) -> None:
    pass


def _wait(config: RankProcessConfig, arenas: Sequence[Arena]) -> None:
    from baton.kv_transfer.device.host_pool import prepare

    for arena in arenas:
        prepare(arena, config.engine.device)
    assert config.files is not None
    config.files.wait_for_turn(config.rank)


def run(config: RankProcessConfig) -> int:
    # These import torch.
    from baton.engine.execution.rank import Follower
    from baton.kv_transfer.endpoint.rank_copier import RankCopier
    from baton.kv_transfer.shared_store import Units
    from baton.worker.engine_process.offload import tiers_of_rank
    from baton.worker.engine_process.paged_kv import paged_kv

    assert config.files is not None, "the engine has several ranks"
    gc.freeze()  # as in the engine process
    arenas = config.arenas
    mapped = () if arenas is None else arenas.map()
    wait = stand_by(config, partial(_wait, config, mapped)) if config.standby else None
    try:
        follower = Follower(config.engine, config.rank, config.files, config.kept_files, wait_for_turn=wait)
    except ValueError as error:
        config.files.fail(error)
        return EXIT_START_FAILED
    layer_done, kv = _nothing, paged_kv(follower)
    if arenas is not None:
        [rank0], units = arenas.ranks(), Units(kv.layout, kv.ranks)
        copier = RankCopier(
            kv, rank0, *mapped, exports=arenas.exports, adopts=arenas.adopts,
            store=units.map(config.store_fds[0]) if config.store_fds else None,
            tiers=tiers_of_rank(config.engine, follower),
        )  # fmt: skip
        layer_done = copier.layer_done
    gc.collect()
    gc.enable()
    gc.freeze()
    follower.run(lambda step: layer_done if step.hands_over else _nothing)
    return 0


if __name__ == "__main__":
    start(RankProcessConfig, run)
