"""Checkpoints that store tensors in another form than most families."""

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from baton.engine.layers.weights import Checkpoint


class Piece(Protocol):
    """A tensor that is a part of a stored one."""

    @property
    def stored(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


TEXT = "language_model."


def of_text(files: Checkpoint) -> dict[str, str]:
    """The tensors of the text model, by the names that they would have alone. A checkpoint that sees images,
    too, has them under a prefix."""
    prefix = TEXT if any(name.startswith(TEXT) for name in files.names()) else ""
    return {name.removeprefix(prefix): name for name in files.names() if name.startswith(prefix)}


P = TypeVar("P", bound=Piece)


class Rearranged(Generic[P]):
    """The base of a `Checkpoint` with the tensors of `files` in the form of most families.

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
