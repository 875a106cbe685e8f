"""Shows the tensors of a checkpoint in the form of most families, if it stores them in another.

    one tensor for several     has their rows, one after the other or in turns
    rows in another order      those of a head, where the checkpoint or the model rotates it in another way
    one tensor for all experts [experts, rows, columns], or transposed [experts, columns, rows]
    scales of FP8              those of blocks become those of rows, where rows of several blocks mix
    other names
    other norms                they multiply by 1 + weight: here the weight has the 1 already

A text model that sees images, too, has its tensors under a prefix. Those of its encoder stay as they are. The
rest is left out.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels import FP8, FP8_GROUP
from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import Checkpoint
from baton.engine.models.vision import TOWER

TEXT = "language_model."
FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
FP8_FORMS = ("fp8", "float-quantized")
"""Checkpoints in FP8, as `Rearranged.quantized` names them."""
SCALES = ("weight_scale", "weight_scale_inv", "input_scale")
NORM = re.compile(r".*(layernorm|[qk]_norm|model\.norm|[eh]norm|shared_head\.norm)\.weight")


class Files(Checkpoint):
    """A checkpoint in files, whose tensors have shapes."""

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError


class Piece(NamedTuple):
    """A tensor in the form of most families."""

    stored: str
    """The tensor of the files that it is a part of."""
    shape: tuple[int, ...]
    read: Callable[[Sequence[Shard]], Tensor]
    """Reads these parts of its dimensions."""


class Rearranged(Checkpoint):
    """The base of a checkpoint with the tensors of `files` in the form of most families. By itself it gives
    the rows of query and key heads our order."""

    quantized: ClassVar[Collection[str]] = ()
    """The formats of quantized checkpoints that it reads, by their `quant_method`; those of
    compressed-tensors by their `format`."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Shard of a name in the files → the same part in other families."""
    left_out: ClassVar[str | tuple[str, ...]] = " "
    """The prefix of tensors that are left out, or several."""
    encoder: ClassVar[Mapping[str, str]] = {}
    """Prefix of tensors of the encoder of images → how their names begin here, behind `TOWER`."""
    interleaved: ClassVar[bool] = False
    """Whether the halves of what is rotated in a head are stored in turns."""
    adds_one: ClassVar[bool] = False
    """Whether norms multiply by 1 + weight."""

    def __init__(self, files: Files) -> None:
        self.config = config = files.config
        self.source = files.source
        self.copies = files.copies
        if (settings := config.quantization) is not None:
            method, form = settings.get("quant_method"), settings.get("format")
            if (form if method == "compressed-tensors" else method) not in self.quantized:
                family = config.architecture
                raise ValueError(f"{self.source}: quantized checkpoints of {family} are not supported")
        rotated = config.head_dim if config.rotary_dim is None else config.rotary_dim
        self._order = rotated_first(config.head_dim, rotated, interleaved=self.interleaved)
        self._files = files
        self._pieces: dict[str, Piece] = {}
        prefix = TEXT if any(name.startswith(TEXT) for name in files.names()) else ""
        for stored in files.names():
            if (of_encoder := self._name_in_encoder(stored)) is not None:
                if config.vision is not None:
                    self._pieces[of_encoder] = self._as_stored(stored)
            elif stored.startswith(prefix) and (name := self._name(stored.removeprefix(prefix))):
                self._pieces.update(self._split(name, stored))

    def _name(self, stored: str) -> str | None:
        """The name of a stored tensor in other families. None: it is left out."""
        for stored_name, name in self.renamed.items():
            stored = stored.replace(stored_name, name)
        return None if stored.startswith(self.left_out) else stored

    def _name_in_encoder(self, stored: str) -> str | None:
        """None: it is no tensor of the encoder."""
        prefixes = (prefix for prefix in self.encoder if stored.startswith(prefix))
        prefix = next(prefixes, None)
        return None if prefix is None else TOWER + self.encoder[prefix] + stored.removeprefix(prefix)

    def _as_stored(self, stored: str) -> Piece:
        shape = self._files.shape(stored)
        return Piece(stored, shape, lambda parts: self._files.read(stored, parts))

    def names(self) -> Collection[str]:
        return self._pieces.keys()

    def file_of(self, name: str) -> str:
        piece = self._pieces.get(name)
        return self._files.file_of(piece.stored if piece else name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        tensor = self._pieces[name].read(parts)
        adds_one = self.adds_one and NORM.fullmatch(name) and not name.startswith(TOWER)
        return tensor.float() + 1 if adds_one else tensor

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        """The tensors in a stored one, by their names in other families. `name`: the one that the stored one
        would have there."""
        module, _, suffix = name.rpartition(".")
        module, _, kind = module.rpartition(".")
        if rows := self._rows(kind):
            yield from self._by_rows(stored, {f"{module}.{part}.{suffix}": rows[part] for part in rows})
        else:
            yield name, self._as_stored(stored)

    def _rows(self, kind: str) -> Mapping[str, Tensor]:
        """The rows of each tensor in a stored one of this kind, by its kind. Empty: it is one, in order."""
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        if kind not in heads:
            return {}
        return {kind: in_heads(torch.arange(heads[kind] * self.config.head_dim), self._order)}

    def _by_rows(self, stored: str, rows: Mapping[str, Tensor]) -> Iterator[tuple[str, Piece]]:
        """Tensors with these rows of a stored one, which has no others. Scales may be those of blocks, or one
        of all rows."""
        shape, count = self._files.shape(stored), sum(map(len, rows.values()))
        scales = stored.endswith(SCALES)

        def read(parts: Sequence[Shard]) -> Tensor:
            return self._files.read(stored, parts)

        if scales and math.prod(shape) == 1:
            yield from ((name, Piece(stored, shape, read)) for name in rows)
            return
        block = 1
        if scales and shape[:1] == (-(-count // FP8_GROUP),):
            block = FP8_GROUP
        elif shape[:1] != (count,):
            raise self._unfit(stored)
        for name, piece_rows in rows.items():
            of_piece = partial(read_rows, read, piece_rows // block, shape[0])
            yield name, Piece(stored, (len(piece_rows), *shape[1:]), of_piece)

    def _fused_experts(
        self, name: str, stored: str, *, transposed: bool = False
    ) -> Iterator[tuple[str, Piece]] | None:
        """The tensors of the experts in one that has them all. None: the name is that of another tensor."""
        fused = FUSED_EXPERTS.fullmatch(name)
        if fused is None:
            return None
        names = [f"{fused[1]}.{{}}.{part}_proj.weight" for part in projections(fused[2])]
        shape = self._files.shape(stored)
        if transposed:
            shape = *shape[:1], *reversed(shape[1:])
        return self._by_expert(stored, shape, names, partial(self._read_expert, transposed=transposed))

    def _by_expert(
        self,
        stored: str,
        shape: Sequence[int],
        names: Sequence[str],
        read: Callable[[str, Shard, range, Sequence[Shard]], Tensor],
        *,
        in_turns: bool = False,
    ) -> Iterator[tuple[str, Piece]]:
        """The tensors of each expert in a stored one. `names` have {} for the number of the expert, and equal
        shares of the rows: one after the other, or in turns.

        `shape` [experts, rows, columns], or [experts, rows] of biases: as other families would have it.
        `read`: as `_read_expert`."""
        dims = 2 if names[0].endswith("bias") else 3
        if len(shape) != dims or 0 in shape or shape[1] % len(names):
            raise self._unfit(stored)
        count, rows, *columns = shape
        size = rows // len(names)
        for expert in range(count):
            for i, name in enumerate(names):
                piece_rows = range(i, rows, len(names)) if in_turns else range(i * size, (i + 1) * size)
                of_expert = partial(read, stored, Shard(expert, expert + 1, count), piece_rows)
                yield name.format(expert), Piece(stored, (size, *columns), of_expert)

    def _read_expert(
        self, stored: str, expert: Shard, rows: range, parts: Sequence[Shard], *, transposed: bool = False
    ) -> Tensor:
        """Parts of the tensor of one expert that has these rows of a stored one."""
        piece_rows, columns = span(rows[parts[0].indices]), parts[1:]
        if transposed:
            matrix = self._files.read(stored, [expert, *columns, piece_rows])[0].T
        else:
            matrix = self._files.read(stored, [expert, piece_rows, *columns])[0]
        return matrix[:: rows.step]

    def _unfit(self, stored: str) -> ValueError:
        shape = list(self._files.shape(stored))
        return ValueError(f"{self._files.file_of(stored)}: tensor {stored} is {shape}")


def span(rows: range) -> Shard:
    """From the first to the last of these rows."""
    stop = rows[-1] + 1 if rows else rows.start
    return Shard(rows.start, stop, stop)


def rotated_first(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> Tensor:
    """The stored dimensions of a head in our order: halves of what is rotated, each before a half of the
    rest. `interleaved`: the halves are stored in turns."""
    rotated, unrotated = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    halves = rotated.view(-1, 2).T if interleaved else rotated.chunk(2)
    return torch.cat([half for pair in zip(halves, unrotated.chunk(2), strict=True) for half in pair])


def in_heads(rows: Tensor, order: Tensor) -> Tensor:
    """The rows of query or key heads, with the dimensions of each head in this order.

    Attention does not change: it only needs products of query and key heads, which both take the order."""
    return rows.view(-1, len(order))[:, order].flatten()


def read_rows(
    read: Callable[[Sequence[Shard]], Tensor], rows: Tensor, size: int, parts: Sequence[Shard]
) -> Tensor:
    """Parts of a tensor that has these rows of a stored one, which has `size` rows and `read` reads."""
    rows = rows[parts[0].indices]
    first, last = int(rows.min()), int(rows.max())
    block = read([Shard(first, last + 1, size), *parts[1:]])
    if rows.equal(torch.arange(first, last + 1)):
        return block
    if block.dtype is FP8:
        return block.view(torch.uint8)[rows - first].view(FP8)
    return block[rows - first]


def rows_in_turns(count: int, sizes: Sequence[int]) -> list[Tensor]:
    """The rows of each of several parts, of which each of `count` heads or groups has all in a row."""
    rows = torch.arange(count * sum(sizes)).view(count, -1)
    return [part.flatten() for part in rows.split(list(sizes), dim=1)]


def projections(kind: str) -> Sequence[str]:
    """The projections in a tensor of experts, by how its name begins."""
    return ("gate", "up") if kind in ("gate_up", "in") else ("down",)
