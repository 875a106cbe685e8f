"""Checkpoints of gpt-oss, in the form of other families: each expert has tensors of its own.

A file has one tensor for a projection of all experts of a layer. `gate_up_proj` has the rows of gate and up
in turns. Matrices are stored in one of two forms:

- plain: [experts, in, out]
- MXFP4 (OCP Microscaling 2023): `_blocks` [experts, out, in / 32, 16] uint8 have two values in a byte, the
  first in its lower half. `_scales` [experts, out, in / 32] uint8 are exponents of 2, plus 127. These values
  are exact in bfloat16, so they are read as such.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part, whole
from baton.engine.layers.weights import Checkpoint
from baton.engine.loader.rearranged import Piece, Rearranged

FUSED = re.compile(r"(.*\.experts)\.((gate_up|down)_proj)(_bias|_blocks|_scales|)$")
BLOCKS = "_blocks"
PROJECTIONS = {"gate_up": ("gate", "up"), "down": ("down",)}
GROUP = 32  # values with one scale
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor(MAGNITUDES + [-value for value in MAGNITUDES], dtype=torch.bfloat16)
PAIRS = torch.stack((VALUES.repeat(16), VALUES.repeat_interleave(16)), dim=1)  # [256, 2]: of each byte
SCALES = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), torch.nan], dtype=torch.bfloat16)


class GptOssCheckpoint(Rearranged):
    """The `Checkpoint` of a gpt-oss model: reads `files`, and gives each expert its tensors."""

    def __init__(self, files: Checkpoint) -> None:
        super().__init__(files)
        for name in files.names():
            if fused := FUSED.match(name):
                self._pieces.update(self._split(name, *fused.groups()))
            else:
                self._stored[name] = name

    def _split(
        self, name: str, experts: str, projection: str, kind: str, suffix: str
    ) -> Iterator[tuple[str, Piece]]:
        """The tensors of each expert in this one, by the names that they would have in other families."""
        if suffix == "_scales":  # read with the blocks
            return
        shape = self._files.shape(name) or ()
        if len(shape) != {"": 3, "_blocks": 4, "_bias": 2}[suffix]:
            raise ValueError(f"{self._files.file_of(name)}: tensor {name} is {list(shape)}")
        if suffix == BLOCKS:
            self._check_scales(f"{experts}.{projection}", shape)
            shape = (*shape[:2], shape[2] * GROUP)
        elif suffix == "":
            shape = (shape[0], shape[2], shape[1])
        turns = len(PROJECTIONS[kind])
        count, rows, *columns = shape
        if 0 in shape or rows % turns:
            raise ValueError(f"{self._files.file_of(name)}: tensor {name} is {list(shape)}")
        for expert in range(count):
            for turn, of in enumerate(PROJECTIONS[kind]):
                to = f"{experts}.{expert}.{of}_proj.{'bias' if suffix == '_bias' else 'weight'}"
                read = self._read_blocks if suffix == BLOCKS else self._read_plain
                of_expert = partial(read, name, Part(expert, expert + 1, count), slice(turn, None, turns))
                yield to, Piece(name, (rows // turns, *columns), of_expert)

    def _check_scales(self, stored: str, blocks: tuple[int, ...]) -> None:
        name = f"{stored}_scales"
        if name not in self._files.names():
            raise ValueError(f"{self._files.file_of(f'{stored}_blocks')}: tensor {name} is missing")
        if self._files.shape(name) != blocks[:3] or blocks[3] != GROUP // 2:
            raise ValueError(
                f"{self._files.file_of(name)}: tensor {name} is {list(self._files.shape(name) or ())}, which "
                f"does not fit blocks of {list(blocks)}"
            )

    def _read_plain(self, stored: str, expert: Part, of_turn: slice, parts: Sequence[Part]) -> Tensor:
        """One tensor of one expert: its rows are those `of_turn` among the stored ones."""
        rows, *columns = parts
        read = self._files.read(stored, [expert, *columns, rows.of(of_turn.step)])[0]
        return (read.T if columns else read)[of_turn]

    def _read_blocks(self, stored: str, expert: Part, of_turn: slice, parts: Sequence[Part]) -> Tensor:
        rows, columns = parts
        first = columns.start // GROUP
        groups = Part(first, -(-columns.stop // GROUP), columns.size // GROUP)
        names = stored, f"{stored.removesuffix(BLOCKS)}_scales"
        blocks, scales = (
            self._files.read(name, [expert, rows.of(of_turn.step), groups, *inside])[0, of_turn]
            for name, inside in zip(names, ([whole(GROUP // 2)], []), strict=True)
        )
        for tensor, name in zip((blocks, scales), names, strict=True):
            if tensor.dtype is not torch.uint8:
                raise ValueError(
                    f"{self._files.file_of(name)}: tensor {name} is of {tensor.dtype}, not of {torch.uint8}"
                )
        values = PAIRS.index_select(0, blocks.flatten().int()).view(*scales.shape, GROUP)
        values *= SCALES[scales.int()][..., None]
        return values.flatten(1)[:, columns.start - first * GROUP : columns.stop - first * GROUP]
