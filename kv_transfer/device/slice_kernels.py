"""Launches the kernels of `copy_kernels`, with their tables. Imported on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from baton.kv_transfer.device import copy_kernels
from baton.kv_transfer.device.pool import Staged, held_heads, of_each_dtype
from baton.kv_transfer.device.tables import Table, Tables
from baton.kv_transfer.layout import ITEM_BYTES, Range, Slice, convertible, slice_bytes
from baton.kv_transfer.transport import PagedKV

_Summed = tuple[Staged, int, int]
"""With the address of its dense memory, and where its checksum is added."""
_Launch = tuple[Callable[..., None], list[list[int]]]
"""Of a kernel, with its lines of the table."""


class SliceKernels:
    """Copies slices between the KV pool of a rank and dense memory on its GPU, on the stream of `tables`.

    However many slices a call has, it launches one kernel for KV and one for each type of states. An *item*
    is a slice with the address of its dense memory.
    """

    def __init__(self, kv: PagedKV, tables: Tables, table: torch.Tensor, *, exported: bool) -> None:
        """Compiles all kernels that will be needed; the caller has set the stream.

        `table`: of a request that has block 0 and state slot 0. `exported`: peers read slots, so kernels also
        compute checksums."""
        layout = kv.layout
        kv_layers = layout.kv_layers
        self._tables = tables
        self._layers = dict(zip(kv_layers, kv.layers, strict=True))
        self._scales = dict(zip(kv_layers, kv.scales, strict=False))  # none, or of all layers
        # Of values and of scales, if there are any: their addresses by layer, any of them, words of a head.
        self._rows = [
            (
                {layer: tensor.data_ptr() for layer, tensor in of.items()},
                tensor,
                copy_kernels.head_words(tensor),
            )
            for of in (self._layers, self._scales)
            for tensor in list(of.values())[:1]
        ]
        self._states = [dict(zip(layout.state_layers, layers, strict=True)) for layers in kv.states]
        self._layout = layout
        self._head_bytes = {dtype: of.parts[None].head_bytes for dtype, of in of_each_dtype(layout).items()}
        self._heads = kv.heads
        # Compile now, not during the first transfer: copies of one position of block 0, and a head of each
        # state in slot 0, there and back. None for the kernels that convert, since they would not give back
        # the same bytes.
        layer, device = kv_layers[0], table.device
        pieces = [Slice(layer, 0, layout.num_kv_heads, 0, 1)]
        pieces += [
            Slice(layout.state_layers[0], first, 1, 1, 0, i)
            for i, (first, _) in enumerate([kv.heads[i] for i in range(len(layout.states))])
        ]
        size = max(slice_bytes(layout, piece) for piece in pieces)
        dense = torch.empty((len(pieces), -(-size // 16) * 16), dtype=torch.uint8, device=device)
        items = [(Staged(piece, 0, table), x.data_ptr()) for piece, x in zip(pieces, dense, strict=True)]
        for into_pool in (False, True):
            self.copy(items, into_pool=into_pool)
        if exported:
            checksum = torch.zeros(1, dtype=torch.int64, device=device)
            at = checksum.data_ptr()
            for into_pool in (False, True):
                self.copy(items, into_pool=into_pool, sums=[at] * len(items))
            copy_kernels.launch_sums(tables.send([dense.data_ptr(), 1, at]).view(1, -1), 1)
        nothing = Staged(Slice(layer, 0, layout.num_kv_heads, 0, 0), 0, table)
        for dtype in ITEM_BYTES:
            if dtype != layout.dtype and convertible(dtype, layout.dtype):
                self._convert([(nothing, dense.data_ptr())], dtype)

    @property
    def fields(self) -> int:
        """Most words that a slice takes in the table of a kernel."""
        return len(self._rows) * copy_kernels.FIELDS

    def close(self) -> None:
        self._layers.clear()
        self._scales.clear()
        self._rows.clear()
        self._states.clear()

    def slice_bytes(self, item: Staged) -> int:
        piece = item.piece
        if piece.state is None:
            return piece.token_count * piece.head_count * self._head_bytes[item.dtype]
        return slice_bytes(self._layout, piece)

    def is_converted(self, item: Staged) -> bool:
        """Whether the slice is in another dtype than the pool.

        If so, this rank computes the checksum of all of it. Else the kernel that scatters the slice sums the
        heads that this rank holds."""
        return item.piece.state is None and item.dtype not in (None, self._layout.dtype)

    def into_pool(self, items: Sequence[tuple[Staged, int]], sums: Sequence[int] = ()) -> None:
        """As `copy`, into the pool, from memory in any dtype."""
        by_dtype: dict[str, list[tuple[tuple[Staged, int], int]]] = {}
        own = self._layout.dtype
        for item, checksum in zip(items, sums or [0] * len(items), strict=True):
            staged = item[0]
            dtype = staged.dtype if staged.piece.state is None else None  # states are never converted
            by_dtype.setdefault(dtype or own, []).append((item, checksum))
        for dtype, some in by_dtype.items():
            of_dtype, checksums = [item for item, _ in some], [checksum for _, checksum in some]
            convert = dtype != self._layout.dtype
            if sums and convert:
                words = [self.slice_bytes(x) // 4 for x, _ in of_dtype]
                lines = zip([address for _, address in of_dtype], words, checksums, strict=True)
                table = self._tables.send([field for line in lines for field in line]).view(len(words), -1)
                copy_kernels.launch_sums(table, max(words))
            if convert:
                self._convert(of_dtype, dtype)
            else:
                self.copy(of_dtype, into_pool=True, sums=checksums if sums else ())

    def held(self, piece: Slice) -> Range:
        """The heads of a slice that this rank holds."""
        return held_heads(piece, self._heads[piece.state])

    def copy(
        self, items: Sequence[tuple[Staged, int]], *, into_pool: bool, sums: Sequence[int] = (),
        behind_sums: Table | None = None,
    ) -> None:  # fmt: skip
        """Copies between the pool and dense memory in the dtype of the pool. `sums`: for each item, the
        address to which its checksum is added.
        `behind_sums`: begins with the checksums, and the lines of the kernels are sent with them."""
        summed = [(*item, checksum) for item, checksum in zip(items, sums or [0] * len(items), strict=True)]
        kv = [item for item in summed if item[0].piece.state is None] if self._states else summed
        launches = self._kv_launches(kv) if kv else []
        for state in range(len(self._states)):
            if of_state := [item for item in summed if item[0].piece.state == state]:
                launches.append(self._state_launch(state, of_state))
        fields = [field for _, lines in launches for line in lines for field in line]
        if behind_sums is None:
            table = self._tables.send(fields)
        else:
            table = behind_sums.send_behind(len(items), fields, self._tables.stream)
        table, start = table.view(-1, copy_kernels.FIELDS), 0
        for launch, lines in launches:
            part = table[start : start + len(lines)] if len(launches) > 1 else table
            launch(part, into_pool=into_pool, sums=bool(sums))
            start += len(lines)

    def _kv_launches(self, items: Sequence[_Summed]) -> list[_Launch]:
        pieces = [x.piece for x, _, _ in items]
        tokens = max([piece.token_count for piece in pieces])
        held = [held_heads(piece, self._heads[None]) for piece in pieces]
        heads = max([stop - start for start, stop in held])
        before = 0  # bytes of a head that stand before these in a slice: scales follow values
        launches: list[_Launch] = []
        for addresses, pool, words in self._rows:
            lines = [
                copy_kernels.line_at(
                    addresses[piece.layer], words, x.table.data_ptr(), address + before * _heads(piece),
                    piece, some, self._heads[None][0], checksum, before // 4 * _heads(piece),
                )
                for (x, address, checksum), piece, some in zip(items, pieces, held, strict=True)
            ]  # fmt: skip
            launches.append(
                (partial(copy_kernels.launch, pool=pool, most_tokens=tokens, most_heads=heads), lines)
            )
            before = 2 * self._layout.head_dim * ITEM_BYTES[self._layout.dtype]
        return launches

    def _state_launch(self, state: int, items: Sequence[_Summed]) -> _Launch:
        pool, own = self._states[state], self._heads[state]
        heads = max(x.piece.head_count for x, _, _ in items)
        lines = [
            copy_kernels.state_line(
                pool[x.piece.layer], x.table[-1:], address, x.piece, held_heads(x.piece, own), own[0],
                checksum=checksum,
            )
            for x, address, checksum in items
        ]  # fmt: skip
        layer = next(iter(pool.values()))
        return partial(copy_kernels.launch_states, pool=layer, most_heads=heads), lines

    def _convert(self, items: Sequence[tuple[Staged, int]], dtype: str) -> None:
        """As `into_pool`, from memory in another dtype."""
        lines = [
            copy_kernels.line_to_convert(
                self._layers[x.piece.layer], self._scales.get(x.piece.layer), x.table,
                address, x.piece, held_heads(x.piece, self._heads[None]), self._heads[None][0],
            )
            for x, address in items
        ]  # fmt: skip
        table = self._tables.send([field for line in lines for field in line]).view(len(lines), -1)
        most = max(1, *(_heads(x.piece) for x, _ in items))
        pool = next(iter(self._layers.values()))
        copy_kernels.launch_converting(table, pool, getattr(torch, dtype), most)


def _heads(piece: Slice) -> int:
    """Of all positions of a slice."""
    return piece.token_count * piece.head_count
