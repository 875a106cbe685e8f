"""Checkpoints that store tensors in another form than most families: the bases of their classes."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Checkpoint


class Piece(NamedTuple):
    """A tensor that is a part of a stored one, or has its rows in another order."""

    stored: str
    shape: tuple[int, ...]
    read: Callable[[Sequence[Part]], Tensor]
    """Reads these parts of its dimensions."""


class Rearranged(Checkpoint):
    """The base of a checkpoint with the tensors of `files` in the form of most families.

    A subclass fills `_stored` and `_pieces`."""

    def __init__(self, files: Checkpoint) -> None:
        self.config = files.config
        self.source = files.source
        if self.config.quantization is not None:
            family = self.config.architecture
            raise ValueError(f"{self.source}: quantized checkpoints of {family} are not supported")
        self._files = files
        self._stored: dict[str, str] = {}  # names in `files` of tensors that are whole there
        self._pieces: dict[str, Piece] = {}

    def names(self) -> Collection[str]:
        return self._stored.keys() | self._pieces.keys()

    def file_of(self, name: str) -> str:
        piece = self._pieces.get(name)
        return self._files.file_of(piece.stored if piece else self._stored.get(name, name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        piece = self._pieces.get(name)
        return piece.shape if piece else self._files.shape(self._stored[name])

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        piece = self._pieces.get(name)
        return piece.read(parts) if piece else self._files.read(self._stored[name], parts)

    def _in_order(self, stored: str, order: Tensor) -> Piece:
        """The projection of queries or keys, with the dimensions of each head in this order."""

        def read(parts: Sequence[Part]) -> Tensor:
            return read_heads(lambda whole: self._files.read(stored, whole), order, parts)

        return Piece(stored, self._files.shape(stored) or (), read)


class ByRows(Rearranged):
    """The base of a checkpoint that reads some tensors of `files` by rows."""

    tensor: ClassVar[re.Pattern[str]]
    """The name of such a tensor: module, kind, and weight or bias."""
    left_out: ClassVar[str] = " "
    """The prefix of tensors that are left out."""

    def __init__(self, files: Checkpoint) -> None:
        super().__init__(files)
        for stored in files.names():
            if match := self.tensor.fullmatch(stored):
                module, kind, what = match.groups()
                parts, shape = dict(self._parts(kind)), files.shape(stored) or (0,)
                if sum(map(len, parts.values())) != shape[0]:
                    raise ValueError(f"{files.file_of(stored)}: tensor {stored} is {list(shape)}")
                for name, rows in parts.items():
                    read = partial(self._read_rows, stored, rows)
                    piece = Piece(stored, (len(rows), *shape[1:]), read)
                    self._pieces[f"{module}.{name}.{what}"] = piece
            elif not stored.startswith(self.left_out):
                self._stored[stored] = stored

    def _parts(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the rows of a stored one belong to."""
        raise NotImplementedError

    def _read_rows(self, stored: str, rows: Tensor, parts: Sequence[Part]) -> Tensor:
        rows = rows[parts[0].indices]
        first, size = int(rows.min()), (self._files.shape(stored) or ())[0]
        read = self._files.read(stored, [Part(first, int(rows.max()) + 1, size), *parts[1:]])
        return read[rows - first]


def rotated_first(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> Tensor:
    """The stored dimensions of a head in our order: halves of what is rotated, each before a half of the
    rest. `interleaved`: the halves are stored in turns."""
    rotated, rest = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    halves = rotated.view(-1, 2).T if interleaved else rotated.chunk(2)
    return torch.cat([half for pair in zip(halves, rest.chunk(2), strict=True) for half in pair])


def halves(head_dim: int) -> Tensor:
    """The stored dimensions of a head in our order, if the checkpoint interleaves its rotated halves a and
    b: (a0, b0, a1, b1, …). The kernels rotate heads in the order (a0, a1, …, b0, b1, …)."""
    return torch.arange(head_dim).view(-1, 2).T.flatten()


def read_heads(read: Callable[[Sequence[Part]], Tensor], order: Tensor, parts: Sequence[Part]) -> Tensor:
    """These parts of the query's or key's projection, with the dimensions of each head in this order. `read`
    reads parts of the stored tensor.

    Attention does not change: it only needs products of query and key heads, which both take the order."""
    rows, *others = parts
    head_dim = len(order)
    begin, end = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
    heads = read([Part(begin, end, rows.size), *others]).unflatten(0, (-1, head_dim))
    return heads[:, order].flatten(0, 1)[rows.start - begin : rows.stop - begin]
