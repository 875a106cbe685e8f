"""Joins the ranks of a model."""

import os

import torch
import torch.distributed as dist

from baton.engine.api.config import EngineConfig
from baton.engine.execution.cuda_ranks import CudaRanks
from baton.engine.execution.host_ranks import HostRanks
from baton.engine.execution.rank_files import RankFiles
from baton.engine.layers.ranks import Ranks


def join(config: EngineConfig, rank: int, files: RankFiles | None) -> tuple[torch.device, Ranks]:
    """This rank's device and its group. `files` None: the model has one rank. Raises `ValueError` if there
    are too few devices."""
    device, ranks = _join(config, rank, files)
    ranks.expert_parallel = config.enable_expert_parallel
    return device, ranks


def _join(config: EngineConfig, rank: int, files: RankFiles | None) -> tuple[torch.device, Ranks]:
    assert (files is None) == (config.tensor_parallel_size == 1), "several ranks, and only these, share files"
    device = torch.device(config.device)
    if files is None:
        return device, Ranks()
    if device.type == "cpu":
        return device, HostRanks(rank, config.tensor_parallel_size, files.exchange)
    first, present = device.index or 0, torch.cuda.device_count()
    if first + config.tensor_parallel_size > present:
        raise ValueError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: --device {config.device} has "
            f"{max(0, present - first)} GPUs from the first one on"
        )
    device = torch.device("cuda", first + rank)
    store = open_store(files.exchange, config.tensor_parallel_size)
    return device, CudaRanks(rank, config.tensor_parallel_size, store, device)


def open_store(fd: int, ranks: int) -> dist.Store:
    """A store in the file `fd`, for the ranks to find each other.

    torch opens it by name, and again when the process ends. So it has a descriptor of its own, which stays
    open."""
    return dist.FileStore(f"/proc/self/fd/{os.dup(fd)}", ranks)
