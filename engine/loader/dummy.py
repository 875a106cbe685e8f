"""Random weights in a model's shape, for benchmarks without a download."""

import hashlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Checkpoint
from baton.engine.model_config import ModelConfig


class DummyCheckpoint(Checkpoint):
    """Each tensor depends only on seed, name and kind of device."""

    def __init__(self, config: ModelConfig, source: str, seed: int, device: torch.device) -> None:
        self.config = config
        self.source = source
        self._seed = seed
        self._device = device

    def names(self) -> Collection[str]:
        return ()

    def file_of(self, name: str) -> str:
        return self.source

    def shape(self, name: str) -> None:
        return None

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        return self._whole(name, [part.size for part in parts])[tuple(part.indices for part in parts)]

    def _whole(self, name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("norm.weight") or name == "rope_freqs.weight":
            return torch.ones(shape, device=self._device)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape, device=self._device).normal_(std=0.02, generator=generator)
