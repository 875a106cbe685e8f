"""Launches the kernels of `copy_kernels`, with their tables. Imported on GPUs."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from baton.kv_names.cache_kinds import ITEM_BYTES, CacheArray
from baton.kv_transfer.device import copy_kernels
from baton.kv_transfer.device.copy_kernels import Pages
from baton.kv_transfer.device.pool import Window, arrays_sent, tensor_planes, window
from baton.kv_transfer.device.tables import Table, Tables
from baton.kv_transfer.layout import Piece, slice_bytes
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.transport import PagedKV

_Summed = tuple[Slice, int, int]
"""With the address of its dense memory, and where its checksum is added."""
_Launch = tuple[Callable[..., None], list[list[int]]]
"""Of a kernel, with its lines of the table."""


class RequestTable:
    """The blocks of a request on the device, and its slot of states."""

    def __init__(
        self,
        kv: PagedKV,
        block_ids: Sequence[int],
        state_slot: int,
        on_device: Callable[[Sequence[int], torch.Tensor | None], torch.Tensor],
    ) -> None:
        """`on_device` copies numbers there, on the stream of the copies: into a tensor, or to new memory."""
        self._kv = kv
        self._table = on_device([*block_ids, state_slot], None)
        self._block_ids = np.array(block_ids)
        self._on_device = on_device
        self._in_windows: tuple[np.ndarray, torch.Tensor] | None = None
        """The window blocks as the device has them, or will have them for what is launched next."""

    @property
    def device(self) -> torch.device:
        return self._table.device

    def address(self, piece: Piece, array: CacheArray) -> int:
        """Of int64 [blocks] in this array, or of the slot of an array of each request. It lives as long as
        this object."""
        window_blocks, block_size = self._kv.window_blocks, self._kv.block_size
        if array.window is None or window_blocks is None:
            return self._table.data_ptr() + 8 * self._kv.part(piece, len(self._block_ids) + 1)[0]
        stop = piece.token_start + piece.token_count
        needed = slice(piece.token_start // block_size, -(-stop // block_size))
        if self._in_windows is None:
            blocks = window_blocks[self._block_ids]
            self._in_windows = blocks, self._on_device(blocks.tolist(), None)
        known, table = self._in_windows
        current = window_blocks[self._block_ids[needed]]
        # A prompt gets them chunk by chunk. Those of slices under way stay, as a slice is a lease on them.
        if (known[needed] != current).any():
            known[needed] = current
            self._on_device(current.tolist(), table[needed])
        return table.data_ptr()


class SliceKernels:
    """Copies slices between the KV pool of a rank and dense memory on its GPU, on the stream of `tables`.

    However many slices a call has, it launches one kernel for each tensor of each array of the cache. An
    *item* is a slice with the address of its dense memory.
    """

    def __init__(self, kv: PagedKV, tables: Tables, table: RequestTable) -> None:
        """Compiles all kernels that will be needed; the caller has set the stream.

        `table`: of a request that has block 0 and state slot 0."""
        layout = kv.layout
        self._tables = tables
        self._planes = tensor_planes(kv)
        # Of each plane: its addresses by layer.
        self._pools = [
            [
                ({layer: x.data_ptr() for layer, x in plane.items()}, Pages.of(next(iter(plane.values()))))
                for plane in of_part
            ]
            for of_part in self._planes
        ]
        self._layout = layout
        self._arrays = arrays_sent(layout)
        self._heads = kv.heads
        # Compile now, not during the first transfer: copies of one position of block 0, and a head of each
        # state in slot 0, there and back. None for the kernels that convert, since they would not give back
        # the same bytes.
        device = table.device
        pieces = [
            Piece(layout.layers[number][0], first, last - first if array.per_token else 1, 0, 1, number)
            for number, (array, (first, last)) in enumerate(zip(layout.arrays, kv.heads, strict=True))
        ]
        size = max(slice_bytes(layout, piece) for piece in pieces)
        dense = torch.empty((len(pieces), -(-size // 16) * 16), dtype=torch.uint8, device=device)
        items = [(Slice(piece, table=table), x.data_ptr()) for piece, x in zip(pieces, dense, strict=True)]
        checksum = torch.zeros(1, dtype=torch.int64, device=device)
        at = checksum.data_ptr()
        for into_pool in (False, True):
            self._copy(items, [at] * len(items), into_pool=into_pool)
        copy_kernels.launch_sums(tables.send([dense.data_ptr(), 1, at]).view(1, -1), 1)
        for (number, dtype), array in self._arrays.items():
            if dtype is not None and array != layout.arrays[number]:
                none = {"token_count" if array.per_token else "head_count": 0}
                nothing = Slice(msgspec.structs.replace(pieces[number], **none), table=table)
                for into_pool in (False, True):
                    self._convert([(nothing, dense.data_ptr())], dtype, into_pool=into_pool)

    def close(self) -> None:
        self._planes.clear()
        self._pools.clear()

    def slice_bytes(self, item: Slice) -> int:
        array = self._arrays[item.piece.array, item.dtype]
        return array.bytes_of(item.piece.head_count, item.piece.token_count)

    def is_converted(self, item: Slice) -> bool:
        """Whether the slice is in another dtype than the pool.

        If so, this rank computes the checksum of all of it. Else the kernel that moves the slice sums the
        heads that this rank holds."""
        return self._arrays[item.piece.array, item.dtype] != self._layout.arrays[item.piece.array]

    def window(self, piece: Piece) -> Window:
        return window(piece, self._layout.arrays[piece.array], self._heads[piece.array])

    def move_and_sum(
        self, items: Sequence[tuple[Slice, int]], *, into_pool: bool, more: int = 0
    ) -> tuple[Table, int]:
        """As `move`. Returns a table with the checksums in its first words, on the device, and where it has
        `more` words for the caller, who gives it back."""
        count = len(items)
        room = count * (1 + max(map(len, self._pools)) * copy_kernels.FIELDS)
        table = self._tables.take(room + more)
        table.words[:count] = 0
        sums = [table.on_device.data_ptr() + 8 * i for i in range(count)]
        if any(self.is_converted(item) for item, _ in items):
            table.send(count, self._tables.stream)
            self.move(items, sums, into_pool=into_pool)
        else:
            self._copy(items, sums, into_pool=into_pool, behind_sums=table)
        return table, room

    def move(self, items: Sequence[tuple[Slice, int]], sums: Sequence[int], *, into_pool: bool) -> None:
        """Copies between the pool and dense memory. `sums`: for each item, the address to which its checksum
        is added."""
        alike: dict[tuple[str | None, int], list[tuple[tuple[Slice, int], int]]] = {}
        for item, checksum in zip(items, sums, strict=True):
            converted = self.is_converted(item[0])
            key = (item[0].dtype, item[0].piece.array) if converted else (None, 0)
            alike.setdefault(key, []).append((item, checksum))
        for (dtype, _), some in alike.items():
            of_dtype, checksums = [item for item, _ in some], [checksum for _, checksum in some]
            if dtype is None:
                self._copy(of_dtype, checksums, into_pool=into_pool)
                continue
            self._convert(of_dtype, dtype, into_pool=into_pool)
            words = [self.slice_bytes(x) // 4 for x, _ in of_dtype]
            lines = zip([address for _, address in of_dtype], words, checksums, strict=True)
            table = self._tables.send([field for line in lines for field in line]).view(len(words), -1)
            copy_kernels.launch_sums(table, max(words))

    def _copy(
        self, items: Sequence[tuple[Slice, int]], sums: Sequence[int], *, into_pool: bool,
        behind_sums: Table | None = None,
    ) -> None:  # fmt: skip
        """As `move`, with dense memory in the dtype of the pool. `behind_sums`: begins with the checksums,
        and the lines of the kernels are sent with them."""
        summed = [(*item, checksum) for item, checksum in zip(items, sums, strict=True)]
        launches: list[_Launch] = []
        for number in range(len(self._pools)):
            if of_part := [item for item in summed if item[0].piece.array == number]:
                launches += self._launches(number, of_part)
        fields = [field for _, lines in launches for line in lines for field in line]
        if behind_sums is None:
            table = self._tables.send(fields)
        else:
            table = behind_sums.send_behind(len(items), fields, self._tables.stream)
        table, start = table.view(-1, copy_kernels.FIELDS), 0
        for launch, lines in launches:
            part = table[start : start + len(lines)] if len(launches) > 1 else table
            launch(part, into_pool=into_pool)
            start += len(lines)

    def _launches(self, number: int, items: Sequence[_Summed]) -> list[_Launch]:
        """For slices of one array, by its number."""
        array = self._layout.arrays[number]
        windows = [self.window(x.piece) for x, _, _ in items]
        most = max([part.count for part in windows]), max([part.heads for part in windows])
        tables = [x.table.address(x.piece, array) for x, _, _ in items]
        before = 0  # bytes of a head that stand before these in a slice: scales follow values
        launches: list[_Launch] = []
        for addresses, pages in self._pools[number]:
            lines = [
                pages.line(
                    addresses[x.piece.layer], blocks, address + before * part.dense_size, part, checksum,
                    before // 4 * part.dense_size,
                )
                for (x, address, checksum), blocks, part in zip(items, tables, windows, strict=True)
            ]  # fmt: skip
            launches.append((partial(copy_kernels.launch, pages=pages, most=most), lines))
            before = array.rows * array.head_dim * ITEM_BYTES[array.dtype]
        return launches

    def _convert(self, items: Sequence[tuple[Slice, int]], dtype: str, *, into_pool: bool) -> None:
        """As `move`, for slices of one array, with memory in another dtype. The pool is in no narrower one,
        so it has no scales."""
        number = items[0][0].piece.array
        [(addresses, _)] = self._pools[number]
        array = self._layout.arrays[number]
        pieces = copy_kernels.pieces_to_convert(array)
        windows = [self.window(x.piece).cut(pieces) for x, _ in items]
        lines = [
            copy_kernels.line_to_convert(
                addresses[x.piece.layer], x.table.address(x.piece, array), address, part
            )
            for (x, address), part in zip(items, windows, strict=True)
        ]  # fmt: skip
        table = self._tables.send([field for line in lines for field in line]).view(len(lines), -1)
        pool = next(iter(self._planes[number][0].values()))
        most = max(1, *(part.dense_size for part in windows))
        copy_kernels.launch_converting(table, pool, getattr(torch, dtype), most, pieces, into_pool=into_pool)
