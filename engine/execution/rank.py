"""The other ranks of a model that spans several devices.

start, together with rank 0 ──▶ run or sample, as rank 0 does ──▶ … ──▶ stop
"""

from collections.abc import Callable

from engine.api.config import EngineConfig
from engine.execution.collectives import join
from engine.execution.commands import Commands, Sample
from engine.execution.graphs import LayerDone
from engine.execution.rank_files import RankFiles
from engine.execution.runner import Launched
from engine.execution.start import Started, start_rank
from engine.step import Step


def follow(
    config: EngineConfig, rank: int, files: RankFiles, layer_done: Callable[[Step], LayerDone]
) -> None:
    """Runs rank `rank` of `tensor_parallel_size`, from 1 on, until rank 0 stops it. Raises `ValueError` for
    mistakes that the user can mend.

    `layer_done(step)` returns the function that learns of each layer with its KV written on this rank."""
    device, ranks = join(config, rank, files)
    started = start_rank(config, device, ranks, lambda *_: None)
    runner = started.runner
    launched: Launched | None = None
    for command in commands(config, started, files).received(rank):
        if isinstance(command, Sample):
            assert launched is not None, "a step is run before it is sampled"
            runner.sample(launched, None)
        else:
            launched = runner.run(command, layer_done(command))
    runner.stop()


def commands(config: EngineConfig, started: Started, files: RankFiles) -> Commands:
    """The stream of commands, as one rank sees it."""
    runner = started.runner
    longest = -(-started.model_config.max_model_len // runner.block_size)
    return Commands(
        files,
        tokens=config.max_num_batched_tokens,
        requests=config.max_num_seqs,
        table_width=runner.table_width or longest,
    )
