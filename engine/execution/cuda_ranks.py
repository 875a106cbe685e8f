"""How ranks on GPUs exchange tensors: NCCL, and peer memory for few bytes. All ranks are on one machine."""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from engine.execution.group import Group

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


class CudaRanks(Group):
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
