"""Checkpoints in which tensors have the rows of several, or their rows in another order."""

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Checkpoint
from baton.engine.loader.rearranged import Rearranged


class Rows(NamedTuple):
    """Some rows of a stored tensor, in our order."""

    stored: str
    rows: Tensor
    shape: tuple[int, ...]


class ByRows(Rearranged[Rows]):
    """The base of a `Checkpoint` that reads some tensors of `files` by rows."""

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
