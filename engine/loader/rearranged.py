"""Checkpoints that store tensors in another form than most families: the bases of their classes."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Checkpoint


class Piece(Protocol):
    """A tensor that is a part of a stored one."""

    @property
    def stored(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


P = TypeVar("P", bound=Piece)


class Rearranged(Checkpoint, Generic[P]):
    """The base of a checkpoint with the tensors of `files` in the form of most families.

    A subclass fills `_stored` and `_pieces`, and reads them."""

    def __init__(self, files: Checkpoint) -> None:
        self.config = files.config
        self.source = files.source
        if self.config.quantization is not None:
            family = self.config.architecture
            raise ValueError(f"{self.source}: quantized checkpoints of {family} are not supported")
        self._files = files
        self._stored: dict[str, str] = {}  # names in `files` of tensors that are whole there
        self._pieces: dict[str, P] = {}

    def names(self) -> Collection[str]:
        return self._stored.keys() | self._pieces.keys()

    def file_of(self, name: str) -> str:
        piece = self._pieces.get(name)
        return self._files.file_of(piece.stored if piece else self._stored.get(name, name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        piece = self._pieces.get(name)
        return piece.shape if piece else self._files.shape(self._stored[name])


class Rows(NamedTuple):
    """Some rows of a stored tensor, in our order."""

    stored: str
    rows: Tensor
    shape: tuple[int, ...]


class ByRows(Rearranged[Rows]):
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
                    self._pieces[f"{module}.{name}.{what}"] = Rows(stored, rows, (len(rows), *shape[1:]))
            elif not stored.startswith(self.left_out):
                self._stored[stored] = stored

    def _parts(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the rows of a stored one belong to."""
        raise NotImplementedError

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        found = self._pieces.get(name)
        if found is None:
            return self._files.read(name, parts)
        rows = found.rows[parts[0].indices]
        first, size = int(rows.min()), (self._files.shape(found.stored) or ())[0]
        read = self._files.read(found.stored, [Part(first, int(rows.max()) + 1, size), *parts[1:]])
        return read[rows - first]


def rotated_first(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> Tensor:
    """The stored dimensions of a head in our order: halves of what is rotated, each before a half of the
    rest. `interleaved`: the halves are stored in turns."""
    rotated, rest = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    halves = rotated.view(-1, 2).T if interleaved else rotated.chunk(2)
    return torch.cat([half for pair in zip(halves, rest.chunk(2), strict=True) for half in pair])


def read_halves(read: Callable[[Sequence[Part]], Tensor], parts: Sequence[Part], head_dim: int) -> Tensor:
    """These parts of the query's or key's projection. `read` reads parts of the stored tensor.

    The checkpoint interleaves the two rotated halves a and b of a head: (a0, b0, a1, b1, …). The kernels
    rotate heads in the order (a0, a1, …, b0, b1, …). Attention does not change, since it only needs products
    of query and key heads, which both take this order."""
    rows, *others = parts
    begin, end = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
    heads = read([Part(begin, end, rows.size), *others])
    halves = heads.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(heads.shape)
    return halves[rows.start - begin : rows.stop - begin]
