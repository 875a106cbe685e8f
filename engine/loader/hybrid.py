"""Checkpoints of models with state layers (Bamba, GraniteMoeHybrid), in the form of other families.

- Some tensors have other names.
- Bamba rotates the first dimensions of a head only, in two halves. Here the halves of a head are rotated, and
  the pairs that are not rotated come last (`Rotary`). Query and key heads take this order when they are read.
  Attention does not change, since it only needs their products.
"""

import re
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine.layers.ranks import Part
from engine.layers.weights import Checkpoint

RENAMED = {
    "model.final_layernorm.": "model.norm.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
}
ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")


class HybridCheckpoint:
    """The `Checkpoint` of a model with state layers: reads `files`."""

    def __init__(self, files: Checkpoint) -> None:
        if files.config.quantization is not None:
            raise ValueError(
                f"{files.source}: quantized checkpoints of {files.config.architecture} are not supported"
            )
        self.config = files.config
        self.source = files.source
        self._files = files
        self._stored = {_renamed(stored): stored for stored in files.names()}

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def file_of(self, name: str) -> str:
        return self._files.file_of(self._stored.get(name, name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._files.shape(self._stored[name])

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        stored, size = self._stored[name], self.config.head_dim
        if not self.config.rotary_dim or not ROTATED.search(name):
            return self._files.read(stored, parts)
        rows, *others = parts
        begin, end = rows.start // size * size, -(-rows.stop // size) * size
        heads = self._files.read(stored, [Part(begin, end, rows.size), *others]).unflatten(0, (-1, size))
        ordered = heads[:, _rotated_first(size, self.config.rotary_dim)].flatten(0, 1)
        return ordered[rows.start - begin : rows.stop - begin]


def _renamed(name: str) -> str:
    for stored, ours in RENAMED.items():
        name = name.replace(stored, ours)
    return name


def _rotated_first(head_dim: int, rotary_dim: int) -> Tensor:
    """The stored dimensions of a head in our order: halves of what is rotated, each before a half of the
    rest."""
    rotated, rest = torch.arange(rotary_dim).chunk(2), torch.arange(rotary_dim, head_dim).chunk(2)
    return torch.cat([half for pair in zip(rotated, rest, strict=True) for half in pair])
