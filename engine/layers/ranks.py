"""Tensor parallelism: which part of each tensor a rank holds, and how ranks exchange results.

A layer computes with its rank's part alone (Megatron-LM, Shoeybi 2019): attention with its heads, the MLP
with its inner columns, embedding and output projection with its tokens. Ranks meet in two places:

    embedding            each rank has some of the rows, the others are zero    ─▶ the next norm sums them
    output, down         each rank has a term of the sum                        ─▶ the next norm sums them
    logits               each rank has some of the columns                      ─▶ rank 0 gathers them

A mixture of experts is like the MLP: a rank has some inner columns of every expert. With *expert parallelism*
it has whole experts instead. Every rank has all tokens, so it computes those that its experts are chosen for,
and the sum over ranks is the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import Kernels


class Shard(NamedTuple):
    """Indices [start, stop) of a dimension with `size` indices, which a rank holds."""

    start: int
    stop: int
    size: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_unsharded(self) -> bool:
        return self.length == self.size

    @property
    def indices(self) -> slice:
        return slice(self.start, self.stop)

    def only_with(self, index: int, other: "Shard") -> "Shard":
        """`other`, if this shard has `index`; else no index of the dimension of `other`."""
        return other if self.start <= index < self.stop else Shard(0, 0, other.size)

    def check_groups(self, size: int, what: str) -> None:
        """Raises `ValueError` naming the matrix `what` if these columns are not whole groups of `size`."""
        if self.start % size or self.length % size:
            raise ValueError(
                f"a rank has the columns [{self.start}, {self.stop}) of {what}, and groups of {size} columns "
                "share a scale; change --tensor-parallel-size"
            )

    def in_groups(self, size: int) -> "Shard":
        """The groups of `size` indices that these are in."""
        return Shard(self.start // size, -(-self.stop // size), -(-self.size // size))

    def of(self, width: int) -> "Shard":
        """The same shard of a dimension that has `width` indices for each index here."""
        return Shard(self.start * width, self.stop * width, self.size * width)


def unsharded(size: int) -> Shard:
    """All indices of a dimension: each rank holds them."""
    return Shard(0, size, size)


class Ranks:
    """What one rank of a model holds, and how it exchanges results with the others. With one rank every
    collective does nothing. `Group` is for several.

    All ranks call the collectives in the same order. But for `gather`, their results have equal bits on all
    ranks."""

    rank = 0
    size = 1
    device_bytes = 0
    """Memory of a GPU that this takes."""
    expert_parallel = False
    """Whether a rank has whole experts."""

    def shard(self, size: int) -> Shard:
        """This rank's part of a dimension: an equal share, rounded up. The last rank has what is left."""
        share = -(-size // self.size)
        start, stop = self.rank * share, min(size, (self.rank + 1) * share)
        assert start < stop, f"{size} is too small for {self.size} ranks"
        return Shard(start, stop, size)

    def shard_with_copies(self, size: int) -> Shard:
        """As `shard`, but with fewer indices than ranks each index is held by several ranks in a row."""
        if size >= self.size:
            return self.shard(size)
        index = self.rank * size // self.size
        return Shard(index, index + 1, size)

    def expert_shards(self, experts: int, inner: int) -> tuple[Shard, Shard]:
        """This rank's part of the experts of a layer, and of the inner columns of each of them."""
        if self.expert_parallel:
            return self.shard(experts), unsharded(inner)
        return unsharded(experts), self.shard(inner)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks. May overwrite x."""
        return x

    def add_rms_norm(
        self, kernels: Kernels, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """`Kernels.add_rms_norm` with the sum of delta over all ranks. May overwrite delta."""
        if delta is not None:
            delta = self.all_reduce(delta)
        return kernels.add_rms_norm(residual, delta, weight, eps)

    def gather(self, x: Tensor, size: int) -> Tensor:
        """The parts of all ranks side by side, on rank 0: [rows, part] → [rows, size]. On other ranks the
        result is undefined."""
        return x

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x with that of rank 0."""

    def close(self) -> None:
        """Leaves the group; the ranks exchange nothing more."""

    def minimum(self, value: int) -> int:
        """The smallest value of all ranks."""
        return value

    def agreed(self, measured: Sequence[float]) -> Sequence[float]:
        """What rank 0 measured, on every rank."""
        return measured


class Group(Ranks):
    """Several ranks; subclasses send and receive."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device

    def gather(self, x: Tensor, size: int) -> Tensor:
        share = -(-size // self.size)
        parts = self._gather(F.pad(x, (0, share - x.shape[1])) if x.shape[1] < share else x)
        return parts.transpose(0, 1).reshape(len(x), self.size * share)[:, :size]

    def minimum(self, value: int) -> int:
        values = torch.tensor([value], device=self._device)
        self._reduce_minimum(values)
        return int(values.item())

    def agreed(self, measured: Sequence[float]) -> Sequence[float]:
        values = torch.tensor(measured, dtype=torch.float64, device=self._device)
        self.broadcast(values)
        return values.tolist()

    def _gather(self, x: Tensor) -> Tensor:
        """[rows, part] → [ranks, rows, part]."""
        raise NotImplementedError

    def _reduce_minimum(self, x: Tensor) -> None:
        """Overwrites x with the smallest of all ranks."""
        raise NotImplementedError
