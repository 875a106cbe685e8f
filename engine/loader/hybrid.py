"""Checkpoints of models with state layers (Bamba, GraniteMoeHybrid), in the form of other families.

- Some tensors have other names.
- Bamba rotates the first dimensions of a head only, in two halves. Here the halves of a head are rotated, and
  the pairs that are not rotated come last (`Rotary`). Query and key heads take this order when they are read.
  Attention does not change, since it only needs their products.
- GraniteMoeHybrid has one tensor for gate and up: `input_linear` [2 · inner, hidden_size]. A layer has such a
  tensor for all its experts, with a dimension of experts before the others. Here each has tensors of its own.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Checkpoint
from baton.engine.loader.rearranged import Piece, Rearranged, rotated_first

RENAMED = {
    "model.final_layernorm.": "model.norm.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
}
ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")
FUSED = re.compile(r"(.*)\.(block_sparse_moe|shared_mlp)\.(input|output)_linear\.weight$")


class HybridCheckpoint(Rearranged):
    """The `Checkpoint` of a model with state layers: reads `files`."""

    def __init__(self, files: Checkpoint) -> None:
        super().__init__(files)
        head_dim, rotary_dim = self.config.head_dim, self.config.rotary_dim
        for stored in files.names():
            if fused := FUSED.match(stored):
                self._pieces.update(self._split(stored, *fused.groups()))
            elif rotary_dim and ROTATED.search(stored):
                self._pieces[_renamed(stored)] = self._in_order(stored, rotated_first(head_dim, rotary_dim))
            else:
                self._stored[_renamed(stored)] = stored

    def _split(self, stored: str, layer: str, of: str, kind: str) -> Iterator[tuple[str, Piece]]:
        """The matrices in this tensor, by the names that they would have in other families."""
        shape, names = self._files.shape(stored) or (), ["gate", "up"] if kind == "input" else ["down"]
        if len(shape) != (3 if of == "block_sparse_moe" else 2) or 0 in shape or shape[-2] % len(names):
            raise ValueError(f"{self._files.file_of(stored)}: tensor {stored} is {list(shape)}")
        size, count = shape[-2] // len(names), shape[0]
        owners = {f"{layer}.mlp.experts.{i}": [Part(i, i + 1, count)] for i in range(count)}
        if of == "shared_mlp":
            owners = {f"{layer}.mlp.shared_expert" if self.config.experts else f"{layer}.mlp": []}
        for owner, experts in owners.items():
            for i, name in enumerate(names):
                read = partial(self._read_matrix, stored, experts, i * size, shape[-2])
                yield f"{owner}.{name}_proj.weight", Piece(stored, (size, shape[-1]), read)

    def _read_matrix(
        self, stored: str, experts: Sequence[Part], first: int, size: int, parts: Sequence[Part]
    ) -> Tensor:
        """Rows from `first` on of a stored tensor [rows, columns], or of one expert in [experts, rows,
        columns]."""
        rows, columns = parts
        read = self._files.read(
            stored, [*experts, Part(first + rows.start, first + rows.stop, size), columns]
        )
        return read[0] if experts else read


def _renamed(name: str) -> str:
    for stored, ours in RENAMED.items():
        name = name.replace(stored, ours)
    return name
