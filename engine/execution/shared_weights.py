"""Weights in pages: one copy for the engine process that serves and the one that stands by, and memory that
is given back while a trainer needs it (`Releasable`).

    an engine that starts alone: loads the model ─▶ moves its weights to new pages ─▶ their files wait for
      others (`Shelf`), if there may be any
    standby: maps the pages, to read ─▶ loads part by part: a part with the same bytes gets the memory of the
      pages ─▶ takes over, unless the pages were written to since it mapped them

New weights are written over the old ones, so a standby that was made before has the wrong ones: another one
is made, which loads the new ones. If the engine that serves ends before it can tell that it had new weights,
or while it writes them, the standby does not take over: the first word of the pages counts when a change
begins and when it has ended. On a CPU nothing else can write to the pages: processes map them to be read, but
for the time of a change. On a GPU a kernel may write where it should not, so sums of the pages are compared,
too: an H200 sums 69 GB in 0.1 s, and a CPU 1 GB.

A standby may have other weights, or a new version of Baton has them in another order. It keeps apart what
differs, up to `MOST_APART`. With more it ends, and the next engine starts alone.

Two parts of a model may have views of one tensor. Each part gets a copy of it then.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.execution.elastic_cache import aligned, memory_of, tensor_at
from baton.engine.execution.memory_sums import sums_of
from baton.engine.layers.in_place import tensors
from baton.engine.layers.linear import packed_at, packed_memory
from baton.engine.layers.ranks import Ranks
from baton.system.device_memory import DeviceMemory, Page
from baton.system.kept_pages import MOST_PAGES, CannotShareError, KeptPages, Shelf, adopted, close, exported

MOST_APART = 256 << 20
"""Bytes of weights that may differ from those of the pages, and so have memory beside them."""
_COUNT_BYTES = aligned(8)
"""Before the weights: how often a change has begun or ended. It is odd during a change."""
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
        apart_bytes: of weights that have memory beside the pages. 0 if the engine started alone.
        loading_bytes: what a standby takes of the GPU at most, beside the pages, until `finish`. Only an
            engine that starts alone measures it.
    """

    def __init__(self, shelf: Shelf | None, device: torch.device, ranks: Ranks, *, alone: bool) -> None:
        """`shelf`: None: no other process may have the pages. `ranks`: no part of the model. `alone`: no
        other process has pages, and the shelf is empty. Raises `MemoryError`."""
        self._shelf = shelf
        self._device = device
        self._ranks = ranks
        self._alone = alone
        self._placed: dict[int, Tensor] = {}
        """By id, until `finish`."""
        self._waiting: list[_Piece] = []
        """Of an engine that starts alone, until `finish`."""
        self._waiting_bytes = 0
        self._changes = 0
        """As the pages had it before they were compared."""
        self._sums: Sequence[int] = ()
        """Of the pages then. Only of a GPU."""
        self.apart_bytes = self.loading_bytes = 0
        self._page_bytes = self._end = self._next = 0
        self._pages: Sequence[Page] = ()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # this thread has its context from now on
            torch.cuda.reset_peak_memory_stats(device)
        if not alone:
            kept = () if shelf is None else shelf.pages()
            assert kept, "the engine that serves has its weights in pages"
            self._map(kept[0])

    def _open(self, page_bytes: int, size: int) -> DeviceMemory:
        exportable = self._shelf is not None
        self._memory = memory = memory_of(self._device, page_bytes, exportable=exportable)
        weakref.finalize(self, memory.close).atexit = False  # pyrefly: ignore[missing-attribute]
        self._page_bytes = memory.page_bytes
        self._address = memory.reserve(size)
        self._next = self._address + _COUNT_BYTES
        return memory

    def _map(self, kept: KeptPages) -> None:
        """Those of the engine that serves."""
        memory = self._open(kept.page_bytes, kept.page_bytes * len(kept.pages))
        if memory.page_bytes != kept.page_bytes:
            close(kept)
            raise MemoryError(f"the pages of weights have {kept.page_bytes} bytes")
        self._pages = adopted(memory, kept)
        memory.map(self._address, self._pages, writable=False)
        self._end = self._address + self.nbytes
        self._changes, self._sums = int(self._count_of_changes()), self._sum()

    def _count_of_changes(self) -> Tensor:
        return self._bytes_at(self._address, 8).view(torch.int64)

    def _sum(self) -> Sequence[int]:
        if self._device.type != "cuda":
            return ()
        return sums_of([(self._address, self._page_bytes)], self._device)(range(len(self._pages))).wait()

    @property
    def nbytes(self) -> int:
        return len(self._pages) * self._page_bytes

    def part_built(self, name: str, part: Any) -> Any:
        """As in `Weights`. Raises `CannotShareError`."""
        self._place(part)
        return part

    @torch.inference_mode()
    def finish(self, model: object) -> None:
        """The model is complete. Raises `MemoryError`, and `CannotShareError`."""
        self._place(model)
        if self._alone:
            self._make_pages()
        self._placed.clear()

    @torch.inference_mode()
    def _place(self, part: object) -> None:
        """Places the tensors of a part that have no place yet."""
        new = [x for x in tensors(part, without=self._ranks) if id(x) not in self._placed]
        self._placed |= {id(x): x for x in new}
        pieces = _pieces(new, self._device)
        if self._alone:
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
        """Whether the pages have the bytes of this piece at this address."""
        if target + piece.size > self._end:
            return False
        old, new = (self._bytes_at(address, piece.size) for address in (piece.address, target))
        word = torch.uint8 if piece.size % 8 else torch.int64
        return all(map(torch.equal, *(x.view(word).split(_COMPARED_WORDS) for x in (old, new))))

    def _keep_apart(self, piece: _Piece) -> None:
        self.apart_bytes += piece.size
        if self.apart_bytes > MOST_APART:
            raise CannotShareError(
                "the weights are others than those of the engine process that serves, or have another "
                "layout, so both cannot share them"
            )

    def _make_pages(self) -> None:
        """Moves all that waits there. Takes the memory of a page or of a tensor more meanwhile."""
        if not self._waiting:
            return
        size = _COUNT_BYTES + sum(aligned(piece.size) for piece in self._waiting)
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
        self._pages = pages
        self._give_back()
        self._put()

    def _put(self) -> None:
        """The pages wait for others, which may map them, if there may be any."""
        self._count_of_changes().zero_()
        self._only_reads()
        if self._shelf is None:
            return
        files = exported(self._memory, self._pages)
        self._shelf.put([files])
        close(files)

    def release(self) -> None:
        """Gives the pages back, while nothing uses them: no other process has them."""
        if self._shelf is not None:
            self._shelf.clear()
        self._memory.release({self._address: self._pages})

    def resume(self) -> None:
        """As in `Releasable`. Other processes may map the pages from now on."""
        self._pages = self._memory.resume({self._address: self._pages})[self._address]
        self._put()

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

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The weights may be written to, in the current stream of a GPU. Nothing else uses them meanwhile. If
        this process ends within, no standby that has these pages takes over. Raises `MemoryError`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # no step reads the pages while their access changes
        self._memory.set_access(self._address, len(self._pages), writable=True)
        self._count_of_changes().add_(1)
        yield
        self._count_of_changes().add_(1)
        self._only_reads()

    def _only_reads(self) -> None:
        """On a GPU access is not taken back: steps that are launched would have to end before."""
        if self._device.type != "cuda":
            self._memory.set_access(self._address, len(self._pages), writable=False)

    def take_over(self) -> bool:
        """No other process uses the pages from now on. False: they may have been written to since they were
        compared."""
        if self._alone:
            return True
        is_same = int(self._count_of_changes()) == self._changes and self._sum() == self._sums
        return is_same and not self._changes % 2


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
