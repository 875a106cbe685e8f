"""Checkpoints of gpt-oss, in the form of other families: each expert has tensors of its own.

A file has one tensor for a projection of all experts of a layer. `gate_up_proj` has the rows of gate and up
in turns. Matrices are stored in one of two forms:

- plain: [experts, in, out]
- MXFP4 (OCP Microscaling 2023): `_blocks` [experts, out, in / 32, 16] uint8 have two values in a byte, the
  first in its lower half. `_scales` [experts, out, in / 32] uint8 are exponents of 2, plus 127. These values
  are exact in bfloat16. A GPU keeps the 4 bits (`Mxfp4`), other devices read plain matrices.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.engine.layers.grouped_linear import GroupsFormat
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Groups
from baton.engine.loader.compressed import exponents, floats
from baton.engine.loader.rearranged import Piece, Rearranged, projections, span

FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales|)$")
BLOCKS = "_blocks"
GROUP = 32  # values with one scale


@dataclass(frozen=True, kw_only=True)
class Mxfp4(GroupsFormat):
    """Experts in MXFP4. All other matrices are plain."""

    name: str = "mxfp4 experts"

    def bytes_per_parameter(
        self, dtype: torch.dtype, *, output: bool = False, experts: bool = False
    ) -> float:
        if output or not experts:
            return dtype.itemsize
        return self.kept_bytes(4, GROUP, dtype, experts=True, floats=True)


def mxfp4(settings: Mapping[str, Any], source: str, device: torch.device) -> Mxfp4:
    return Mxfp4(device=device)


class GptOssCheckpoint(Rearranged):
    quantized = ("mxfp4",)

    def groups(self, name: str, parts: Sequence[Shard]) -> Groups | None:
        read = self._pieces[name].read
        if not isinstance(read, partial) or read.func != self._read_blocks:
            return None
        columns = parts[1]
        if columns.start % GROUP or columns.stop % GROUP:
            return None
        stored, expert, rows = read.args
        return floats(*self._stored(stored, expert, rows, parts))

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        fused = FUSED.match(name)
        if fused is None:
            yield from super()._split(name, stored)
            return
        experts, projection, suffix = fused.groups()
        shape = self._files.shape(stored)
        if suffix == "_scales":  # read with the blocks
            return
        read = self._read_expert
        if suffix == BLOCKS:
            if len(shape) != 4:
                raise self._unfit(stored)
            self._check_scales(f"{experts}.{projection}_proj", shape)
            shape, read = (*shape[:2], shape[2] * GROUP), self._read_blocks
        elif suffix == "":
            shape = (*shape[:1], *reversed(shape[1:]))
            read = partial(self._read_expert, transposed=True)
        what = "bias" if suffix == "_bias" else "weight"
        names = [f"{experts}.{{}}.{part}_proj.{what}" for part in projections(projection)]
        yield from self._by_expert(stored, shape, names, read, in_turns=True)

    def _check_scales(self, stored: str, blocks: tuple[int, ...]) -> None:
        name = f"{stored}_scales"
        if name not in self._files.names():
            raise ValueError(f"{self._files.file_of(f'{stored}_blocks')}: tensor {name} is missing")
        if self._files.shape(name) != blocks[:3] or blocks[3] != GROUP // 2:
            raise ValueError(
                f"{self._files.file_of(name)}: tensor {name} is {list(self._files.shape(name))}, which "
                f"does not fit blocks of {list(blocks)}"
            )

    def _read_blocks(self, stored: str, expert: Shard, rows: range, parts: Sequence[Shard]) -> Tensor:
        """As `_read_expert`."""
        columns, values = parts[1], floats(*self._stored(stored, expert, rows, parts)).values().bfloat16()
        before = columns.in_groups(GROUP).start * GROUP
        return values[:, columns.start - before : columns.stop - before]

    def _stored(
        self, stored: str, expert: Shard, rows: range, parts: Sequence[Shard]
    ) -> tuple[Tensor, Tensor]:
        """The blocks [rows, groups, 16] with these parts, and their scales [rows, groups] in float32."""
        groups, expert_rows = parts[1].in_groups(GROUP), span(rows[parts[0].indices])
        names = stored, f"{stored.removesuffix(BLOCKS)}_scales"
        blocks, scales = (
            self._files.read(name, [expert, expert_rows, groups, *inside])[0, :: rows.step]
            for name, inside in zip(names, ([unsharded(GROUP // 2)], []), strict=True)
        )
        for tensor, name in zip((blocks, scales), names, strict=True):
            if tensor.dtype is not torch.uint8:
                raise ValueError(
                    f"{self._files.file_of(name)}: tensor {name} is of {tensor.dtype}, not of {torch.uint8}"
                )
        return blocks, exponents(scales)
