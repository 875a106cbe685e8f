"""How ranks on GPUs exchange tensors: peer memory, and NCCL. All ranks are on one machine."""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from baton.engine.kernels import Kernels
from baton.engine.layers.ranks import Group

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""NVLink multicast stays off. Ranks of one machine find each other over the loopback interface."""
INBOX_BYTES = 128 << 20
"""Memory of a rank that the others write to. For two ranks: two sums of 8,192 rows with 4,096 bfloat16 each.
More rows go in parts."""
SENT_BYTES = 8 << 20
"""With more than two ranks: most bytes that a rank sends for a sum and its norm in one kernel. Each rank gets
all of them, so many bytes are faster as a two-shot all-reduce."""
LOGITS_BYTES = 64 << 20
"""Memory of rank 0 for logits of the others. With two ranks: 512 rows of half of 128,000 bfloat16 each."""
TOKENS_BYTES = 64 << 10
"""Memory of a rank for what rank 0 broadcasts."""
TWO_SHOT_BYTES = 64 << 20
"""Most bytes of a two-shot all-reduce; NCCL is as fast from there on."""


class CudaRanks(Group):
    """Ranks on the GPUs of one machine, one process each. CUDA graphs can capture all but `minimum`.

    A sum and the norm after it are one kernel (`engine.kernels.sum_norm`). It sends all terms to all
    ranks. For two ranks no way needs fewer bytes. More ranks send fewer if each first sums a part (two-shot
    all-reduce)."""

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        from baton.engine.kernels.peer_copy import PeerCopy, counts_bytes
        from baton.engine.kernels.sum_norm import SumNorm

        super().__init__(rank, size, device)
        os.environ.update(ENVIRONMENT)
        torch.cuda.set_device(device)
        free, _ = torch.cuda.mem_get_info(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
        world = dist.group.WORLD
        assert world is not None
        self._name = world.group_name
        self._two_shot_bytes = TWO_SHOT_BYTES if size in (4, 8) else 0  # torch's kernel is for these sizes
        self._shared = symmetric_memory.empty(max(16, self._two_shot_bytes), dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._shared, self._name)
        self._inboxes: list[Tensor] = []

        def inboxes(nbytes: int) -> list[int]:
            """Memory of so many zero bytes on each rank. Returns where this device sees them."""
            self._inboxes.append(symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device).zero_())
            return symmetric_memory.rendezvous(self._inboxes[-1], self._name).buffer_ptrs

        self._sum_norm = SumNorm(rank, inboxes(INBOX_BYTES), INBOX_BYTES, device)
        logits, tokens = (counts_bytes(size) + nbytes for nbytes in (LOGITS_BYTES, TOKENS_BYTES))
        self._logits_copies = PeerCopy(rank, inboxes(logits), logits, device)
        self._token_copies = PeerCopy(rank, inboxes(tokens), tokens, device)
        dist.barrier()  # no rank writes to an inbox before its owner has cleared it
        self.device_bytes = free - torch.cuda.mem_get_info(device)[0]

    def all_reduce(self, x: Tensor) -> Tensor:
        size = x.nbytes
        if size > self._two_shot_bytes or size % 16 or x.dtype not in (torch.bfloat16, torch.float32):
            dist.all_reduce(x)
            return x
        shared = self._shared[:size].view(x.dtype).view(x.shape).copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)

    def add_rms_norm(
        self, kernels: Kernels, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        if delta is None or (self.size > 2 and delta.nbytes * (self.size - 1) > SENT_BYTES):
            return super().add_rms_norm(kernels, residual, delta, weight, eps)
        return self._sum_norm(residual, delta, weight, eps)

    def gather(self, x: Tensor, size: int) -> Tensor:
        if self._logits_copies.can_gather(len(x), -(-size // self.size), x.itemsize):
            return self._logits_copies.gather(x, size)
        return super().gather(x, size)

    def broadcast(self, x: Tensor) -> None:
        if self._token_copies.can_broadcast(x):
            self._token_copies.broadcast(x)
        else:
            dist.broadcast(x, 0)

    def close(self) -> None:
        dist.destroy_process_group()

    def _gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(gathered, x)
        return gathered

    def _reduce_minimum(self, x: Tensor) -> None:
        dist.all_reduce(x, dist.ReduceOp.MIN)
