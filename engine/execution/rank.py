"""The ranks of a model that spans several devices: how they join, and what those from 1 on do.

start, together with rank 0 ──▶ run or sample, as rank 0 does ──▶ … ──▶ stop
                                  read, replace or drop weights; give memory back, or take it
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from baton.engine.api.config import EngineConfig
from baton.engine.execution.commands import Commands, Drop, Memory, Move, Replace, Sample, Stage
from baton.engine.execution.cuda_ranks import CudaRanks
from baton.engine.execution.graphs import LayerDone
from baton.engine.execution.host_ranks import HostRanks
from baton.engine.execution.kept_cache import Keep
from baton.engine.execution.memory_sizing import tier_places
from baton.engine.execution.rank_files import RankFiles
from baton.engine.execution.runner import Launched
from baton.engine.execution.start import Started, start_rank
from baton.engine.layers.ranks import Ranks
from baton.engine.loader.live_weights import LoadedModel, NewWeights
from baton.engine.step import Step
from baton.system.kept_pages import KeptMemory


class Follower:
    """A rank from 1 on. Its constructor returns when all ranks have started.

    It has the same view of its cache as `Engine` on rank 0."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        files: RankFiles,
        kept: Sequence[KeptMemory] = (),
        *,
        wait_for_turn: Callable[[], None] | None = None,
    ) -> None:
        """`kept`: for its KV. Empty: the KV ends with it. `wait_for_turn`: as in `build_engine`. Raises
        `ValueError` for mistakes that the user can mend."""
        device, ranks = join(config, rank, files)

        keep = Keep(kept, wait_for_turn=wait_for_turn)
        started = start_rank(config, device, ranks, lambda *_: None, keep)
        self.ranks = ranks
        self.model_config = started.model_config
        self.cache_spec = started.cache_spec
        self.block_size = started.runner.block_size
        self.cache_arrays = started.cache_arrays
        self.caches = started.runner.cache.of_layers
        self.offload_places = tier_places(
            config, started.pool, self.cache_spec, self.block_size, self.ranks.size
        )
        self._runner = started.runner
        self._commands = commands(config, started, files)
        self._memory = started.memory
        self._weights = RankWeights(started.loaded, self._commands, ranks.rank)

    def run(self, layer_done: Callable[[Step], LayerDone]) -> None:
        """Computes what rank 0 computes until rank 0 stops.

        `layer_done(step)` returns the function that learns of each layer with its KV written on this rank."""
        launched: Launched | None = None
        for command in self._commands.received(self.ranks.rank):
            match command:
                case Step():
                    done = layer_done(command)
                    if command.awaits_kv:
                        done = self._commands.waited(self.ranks.rank, done)
                    launched = self._runner.run(command, done)
                case Sample():
                    assert launched is not None, "a step is run before it is sampled"
                    self._runner.sample(launched, None)
                case Move(moves):
                    self._runner.follow(moves)
                case Stage():
                    self._weights.stage(command)
                case Replace():
                    self._weights.replace()
                case Drop():
                    self._weights.drop()
                case Memory():
                    self._set_memory(command)
        self._weights.close()
        self._runner.stop()

    def _set_memory(self, command: Memory) -> None:
        """Rank 0 orders it while no step is under way."""
        reason = ""
        try:
            self._memory.set(command.tag, release=command.release)
        except MemoryError as error:
            reason = str(error) or "no memory is left"
        self._commands.answer(self.ranks.rank, command, reason)


class RankWeights:
    """New weights of a rank from 1 on, as rank 0 orders: it reads its part in a thread."""

    def __init__(self, loaded: LoadedModel, commands: Commands, rank: int) -> None:
        self._loaded = loaded
        self._commands = commands
        self._rank = rank
        self._thread: ThreadPoolExecutor | None = None
        self._staged: Future[NewWeights] | None = None

    def stage(self, command: Stage) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "weights")
        self._staged = self._thread.submit(self._loaded.stage, command.path)
        self._staged.add_done_callback(partial(self._read, command))

    def _read(self, command: Stage, staged: "Future[NewWeights]") -> None:
        error = staged.exception()
        reason = "" if error is None else str(error) or type(error).__name__
        self._commands.answer(self._rank, command, reason)

    def replace(self) -> None:
        assert self._staged is not None, "rank 0 knows that they were read"
        self._staged.result().apply()
        self._staged = None

    def drop(self) -> None:
        self._staged = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def commands(config: EngineConfig, started: Started, files: RankFiles) -> Commands:
    """The stream of commands, as one rank sees it."""
    runner = started.runner
    longest = -(-started.model_config.max_model_len // runner.block_size)
    longest *= 1 if started.pool.window_blocks is None else 2
    return Commands(
        files,
        tokens=config.max_num_batched_tokens,
        requests=config.max_num_seqs,
        table_width=runner.cache.table_width or longest,
        ahead=runner.ahead,
        image_bytes=runner.image_bytes,
    )


def join(config: EngineConfig, rank: int, files: RankFiles | None) -> tuple[torch.device, Ranks]:
    """This rank's device and its group. `files` None: the model has one rank. Raises `ValueError` if there
    are too few devices."""
    size, device = config.tensor_parallel_size, torch.device(config.device)
    assert (files is None) == (size == 1), "several ranks, and only these, share files"
    if files is None:
        ranks = Ranks()
    elif device.type == "cpu":
        ranks = HostRanks(rank, size, files.exchange)
    else:
        first, present = device.index or 0, torch.cuda.device_count()
        if first + size > present:
            raise ValueError(
                f"--tensor-parallel-size {size}: --device {config.device} has {max(0, present - first)} GPUs "
                "from the first one on"
            )
        device = torch.device("cuda", first + rank)
        ranks = CudaRanks(rank, size, open_store(files.exchange, size), device)
    ranks.expert_parallel = config.enable_expert_parallel
    return device, ranks


def open_store(fd: int, ranks: int) -> dist.Store:
    """A store in the file `fd`, for the ranks to find each other.

    torch opens it by name, and again when the process ends. So it has a descriptor of its own, which stays
    open."""
    return dist.FileStore(f"/proc/self/fd/{os.dup(fd)}", ranks)
