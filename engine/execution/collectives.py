"""How ranks exchange tensors: gloo on CPUs; NCCL and peer memory on GPUs. All ranks are on one machine."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.api.config import EngineConfig
from engine.execution.rank_files import RankFiles
from engine.layers.ranks import Ranks

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""NVLink multicast stays off. Ranks of one machine find each other over the loopback interface."""
ONE_SHOT_BYTES = 512 << 10
"""Most bytes of a one-shot all-reduce of two ranks. It reads the tensors of all other ranks, so with more
ranks it pays off for fewer bytes."""
TWO_SHOT_BYTES = 64 << 20
"""Most bytes of a two-shot all-reduce; NCCL is as fast from there on."""


def join(config: EngineConfig, rank: int, files: RankFiles | None) -> tuple[torch.device, Ranks]:
    """This rank's device and its group. `files` None: the model has one rank. Raises `ValueError` if there
    are too few devices."""
    assert (files is None) == (config.tensor_parallel_size == 1), "several ranks, and only these, share files"
    device = torch.device(config.device)
    if files is None:
        return device, Ranks()
    # A path, since torch opens the store by name.
    store = dist.FileStore(f"/proc/self/fd/{files.store}", config.tensor_parallel_size)
    if device.type == "cpu":
        return device, GlooRanks(rank, config.tensor_parallel_size, store)
    first, present = device.index or 0, torch.cuda.device_count()
    if first + config.tensor_parallel_size > present:
        raise ValueError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: --device {config.device} has "
            f"{max(0, present - first)} GPUs from the first one on"
        )
    device = torch.device("cuda", first + rank)
    return device, CudaRanks(rank, config.tensor_parallel_size, store, device)


class _Group(Ranks):
    """Several ranks; subclasses send and receive."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        share = -(-size // self.size)
        parts = self._gather(F.pad(x, (0, share - x.shape[1])) if x.shape[1] < share else x)
        return parts.transpose(0, 1).reshape(len(x), self.size * share)[:, :size]

    def least(self, value: int) -> int:
        least = torch.tensor([value], device=self._device)
        self._minimum(least)
        return int(least.item())

    def _gather(self, x: Tensor) -> Tensor:
        """[rows, part] → [ranks, rows, part]."""
        raise NotImplementedError

    def _minimum(self, x: Tensor) -> None:
        """Overwrites x with the least of all ranks."""
        raise NotImplementedError


class GlooRanks(_Group):
    """Ranks on CPUs. The group is no global state of torch: in tests, threads of one process are ranks."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        super().__init__(rank, size, torch.device("cpu"))
        gloo: Any = dist.ProcessGroupGloo  # its options have no type hints
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        self._group = gloo(store, rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def broadcast(self, x: Tensor) -> None:
        self._group.broadcast(x, 0).wait()

    def _gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        self._group.allgather(list(gathered), x).wait()
        return gathered

    def _minimum(self, x: Tensor) -> None:
        self._group.allreduce([x], dist.ReduceOp.MIN).wait()


class CudaRanks(_Group):
    """Ranks on the GPUs of one machine, one process each. CUDA graphs can capture all but `least`.

    An all-reduce of few bytes costs the time of its barriers, so it reads peer memory directly. One-shot:
    each rank sums all tensors. Two-shot: each rank sums a part, and then collects the parts of the others.
    Both sum in the order of the ranks, between barriers."""

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        super().__init__(rank, size, device)
        os.environ.update(ENVIRONMENT)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
        world = dist.group.WORLD
        assert world is not None
        self._name = world.group_name
        self._peer_bytes = TWO_SHOT_BYTES if size in (2, 4, 8) else 0  # torch's kernels are for these sizes
        self._one_shot_bytes = min(ONE_SHOT_BYTES // (size - 1), self._peer_bytes)
        self._memory = symmetric_memory.empty(max(16, self._peer_bytes), dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._memory, self._name)

    def all_reduce(self, x: Tensor) -> Tensor:
        size = x.nbytes
        if size > self._peer_bytes or size % 16 or x.dtype not in (torch.bfloat16, torch.float32):
            dist.all_reduce(x)
            return x
        ops, shared = torch.ops.symm_mem, self._memory[:size].view(x.dtype).view(x.shape)
        if size <= self._one_shot_bytes:
            return ops.one_shot_all_reduce_copy_out(shared, x, "sum", self._name, x)
        shared.copy_(x)
        return ops.two_shot_all_reduce_out(shared, "sum", self._name, x)

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, 0)

    def close(self) -> None:
        dist.destroy_process_group()

    def _gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(gathered, x)
        return gathered

    def _minimum(self, x: Tensor) -> None:
        dist.all_reduce(x, dist.ReduceOp.MIN)
