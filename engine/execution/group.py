"""What ranks on any device have in common."""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.ranks import Ranks


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
