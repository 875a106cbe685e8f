"""One copy of the weights for the engine process that serves and the one that stands by.

    first engine: loads the model ─▶ moves its weights to pages ─▶ their files wait for others (`Shelf`)
    standby: maps the pages, to read ─▶ sums them ─▶ loads part by part: a part with the same bytes gets
      the memory of the pages ─▶ takes over: the sums are as before ─▶ may write
    an engine that starts when no other one is there: loads part by part, and writes each part to the pages

New weights are written over the old ones, so a standby that was made before has the wrong ones: another one
is made, which loads the new ones. If the engine that serves ends before it can tell that it had new weights,
or while it writes them, the sums differ, and the standby does not take over.

Two parts of a model may have views of one tensor. Each part gets a copy of it then.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.execution.elastic_cache import memory_of, tensor_at
from baton.engine.execution.memory_saver import aligned
from baton.engine.execution.memory_sums import sums_of
from baton.engine.layers.in_place import tensors
from baton.engine.layers.linear import packed_at, packed_memory
from baton.engine.layers.ranks import Ranks
from baton.machine.device_memory import DeviceMemory, Page
from baton.machine.kept_pages import MOST_PAGES, KeptPages, Shelf, adopted, close, exported

MOST_APART = 256 << 20
"""Bytes of weights on a GPU that may differ from those of the pages, and so have memory beside them."""
_COMPARED_WORDS = 8 << 20
"""At once. Torch makes a byte of memory for each."""


class _Piece(NamedTuple):
    """Memory that tensors share, or that of one that is packed."""

    address: int
    size: int
    tensors: list[Tensor]


class SharedWeights:
    """The weights of one rank. Its memory is free when no tensor is left.

    Use it in this order: `part_built` for each part of the model, `finish`, then `take_over`.

    Attributes:
        nbytes: of the pages.
        apart_bytes: of weights that have memory beside the pages. Those of the first engine have none.
        loading_bytes: what a standby takes of the GPU at most, beside the pages, until `finish`. Only the
            first engine measures it.
    """

    def __init__(self, shelf: Shelf, device: torch.device, ranks: Ranks, *, alone: bool) -> None:
        """`ranks`: no part of the model. `alone`: no other process has the pages. Raises `MemoryError`."""
        self._shelf = shelf
        self._device = device
        self._ranks = ranks
        self._alone = alone
        self._placed: dict[int, Tensor] = {}
        """By id, until `finish`."""
        self._waiting: list[_Piece] = []
        """Of the first engine, until `finish`."""
        self._waiting_bytes = 0
        self._sums: Sequence[int] = ()
        """Of the pages, while another process may write to them."""
        self.apart_bytes = self.loading_bytes = 0
        self._most_apart = MOST_APART if device.type == "cuda" else None
        self._page_bytes = self._count = self._end = self._next = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # this thread has its context from now on
            torch.cuda.reset_peak_memory_stats(device)
        kept = shelf.pages()
        assert alone or kept, "the engine that serves has its weights in pages"
        self._is_first = not kept
        if kept:
            self._map(kept[0])

    def _open(self, page_bytes: int, size: int) -> DeviceMemory:
        self._memory = memory = memory_of(self._device, page_bytes, exportable=True)
        weakref.finalize(self, memory.close).atexit = False  # pyrefly: ignore[missing-attribute]
        self._page_bytes = memory.page_bytes
        self._address = self._next = memory.reserve(size)
        return memory

    def _map(self, kept: KeptPages) -> None:
        """Those of an engine before."""
        self._count = len(kept.pages)
        memory = self._open(kept.page_bytes, kept.page_bytes * self._count)
        if memory.page_bytes != kept.page_bytes:
            close(kept)
            raise MemoryError(f"the pages of weights have {kept.page_bytes} bytes")
        memory.map(self._address, adopted(memory, kept), writable=self._alone)
        self._end = self._address + self.nbytes
        if not self._alone:
            self._sums = self._sum()  # before they are compared, so that what is compared has these sums

    def _sum(self) -> Sequence[int]:
        return sums_of([(self._address, self._page_bytes)], self._device)(range(self._count)).wait()

    @property
    def nbytes(self) -> int:
        return self._count * self._page_bytes

    def part_built(self, name: str, part: Any) -> Any:
        """As in `Weights`. Raises `ValueError` if too many weights differ on a GPU."""
        self._place(part)
        return part

    @torch.inference_mode()
    def finish(self, model: object) -> None:
        """The model is complete. Raises `MemoryError`, and `ValueError` as `part_built`."""
        self._place(model)
        if self._is_first:
            self._make_pages()
        self._placed.clear()

    @torch.inference_mode()
    def _place(self, part: object) -> None:
        """Places the tensors of a part that have no place yet."""
        new = [x for x in tensors(part, beside=self._ranks) if id(x) not in self._placed]
        self._placed |= {id(x): x for x in new}
        pieces = _pieces(new, self._device)
        if self._is_first:
            if self._device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self._device) - self._waiting_bytes
                self.loading_bytes = max(self.loading_bytes, peak)
                torch.cuda.reset_peak_memory_stats(self._device)
            self._waiting += pieces
            self._waiting_bytes += sum(piece.size for piece in pieces)
            return
        for piece in pieces:
            target, self._next = self._next, self._next + aligned(piece.size)
            if self._has(piece, target):
                self._move(piece, target)
            else:
                self._keep_apart(piece)
        self._give_back()

    def _has(self, piece: _Piece, target: int) -> bool:
        """Whether the pages have the bytes of this piece at this address, or have them now."""
        if target + piece.size > self._end:
            return False
        old, new = (self._bytes_at(address, piece.size) for address in (piece.address, target))
        if self._alone:
            new.copy_(old)
            return True
        word = torch.uint8 if piece.size % 8 else torch.int64
        return all(map(torch.equal, *(x.view(word).split(_COMPARED_WORDS) for x in (old, new))))

    def _keep_apart(self, piece: _Piece) -> None:
        self.apart_bytes += piece.size
        if self._most_apart is not None and self.apart_bytes > self._most_apart:
            raise ValueError(
                "the weights are others than those that the engine process before this one has in the memory "
                "of the GPU, and there is no room for both"
            )

    def _make_pages(self) -> None:
        """Moves all that waits there. Takes the memory of a page or of a tensor more meanwhile."""
        size = sum(aligned(piece.size) for piece in self._waiting)
        if not size:
            return
        memory = self._open(-(-size // MOST_PAGES), size)
        self._end = self._address
        pages: list[Page] = []
        self._waiting.reverse()
        while self._waiting:
            piece = self._waiting.pop()
            if (lacks := self._next + piece.size - self._end) > 0:
                self._give_back()  # what the pieces before it had
                created = memory.create(-(-lacks // memory.page_bytes))
                memory.map(self._end, created)
                self._end += len(created) * memory.page_bytes
                pages += created
            self._bytes_at(self._next, piece.size).copy_(self._bytes_at(piece.address, piece.size))
            self._move(piece, self._next)
            self._next += aligned(piece.size)
        self._count = len(pages)
        self._give_back()
        files = exported(memory, pages)
        self._shelf.put([files])
        close(files)

    def _bytes_at(self, address: int, size: int) -> Tensor:
        return tensor_at(address, (size,), torch.uint8, self._device, owner=self)

    def _move(self, piece: _Piece, target: int) -> None:
        """The tensors of this piece have the bytes at this address from now on."""
        for tensor in piece.tensors:
            if tensor.is_mkldnn:
                with torch.inference_mode(tensor.is_inference()):
                    tensor.data = packed_at(target, tensor)
                tensor.owner = self  # pyrefly: ignore[missing-attribute]
                continue
            storage = self._bytes_at(target, piece.size).untyped_storage()
            tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _give_back(self) -> None:
        """The device gets the memory of tensors that have moved."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def take_over(self) -> bool:
        """No other process uses the pages from now on, and this one may write to them. False: they were
        written to since they were compared. Raises `MemoryError`."""
        if self._alone:
            return True
        if self._sum() != self._sums:
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # no step reads the pages while their access changes
        self._memory.allow_writes(self._address, self._count)
        self._alone = True
        return True


def _pieces(some: Iterable[Tensor], device: torch.device) -> list[_Piece]:
    """The memory of tensors of this device."""
    pieces: dict[int, _Piece] = {}
    for tensor in some:
        if tensor.device.type != device.type:
            continue
        if tensor.is_mkldnn:
            address, size = packed_memory(tensor)
        else:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        if size:
            pieces.setdefault(address, _Piece(address, size, [])).tensors.append(tensor)
    return [*pieces.values()]
