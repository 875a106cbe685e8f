"""Two collectives that vLLM's communicator for CPUs lacks (0.32). With data parallelism vLLM takes the rows
of tokens to the ranks with their experts by `all_gatherv`, and the results back by `reduce_scatterv`.

Ranks have unequal numbers of rows, and gloo has no collective for that: rows are padded, and each rank gets
the sum of all rows, of which it keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def add_collectives() -> None:
    """In each process with the model, before its first step. May be repeated."""
    if "all_gatherv" not in vars(CpuCommunicator):
        CpuCommunicator.all_gatherv = _all_gatherv
        CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Returns the rows of all ranks, one rank after the other. `sizes`: how many each has; None: as many."""
    assert dim == 0, "vLLM gathers rows"
    if isinstance(input_, list):
        return [_gather(self, each, sizes) for each in input_]
    return _gather(self, input_, sizes)


def _gather(self: Any, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    sizes = sizes or [len(rows)] * self.world_size
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Returns the rows of this rank, summed over all ranks."""
    assert dim == 0, "vLLM scatters rows"
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()
