"""The KV cache that an engine hands to `endpoint`, and the events that its sender and its receiver report.

An event names its transfer by id, and by the `owner` that the engine gave with the call: the object that the
end of the transfer concerns. Only vLLM's connector, whose events cross a socket, gives none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.kv_transfer.layout import KVLayout, Piece, Range
from baton.kv_transfer.protocol.local_messages import Arrival, Local
from baton.kv_transfer.protocol.messages import FirstToken

if TYPE_CHECKING:
    import numpy as np
    import torch

    Rows = Sequence[torch.Tensor] | torch.Tensor
    """Of an array of the cache in one layer: the rows as one tensor, or as one tensor each (on CPUs)."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The cache of an engine, or of one rank of it. The engine owns the tensors."""

    planes: "Sequence[Sequence[Sequence[Rows]]]"
    """Of each array of the layout, values, and in FP8 scales, and of these each layer that keeps the array:
    [rows][blocks, positions of a block, heads of this rank, head_dim], in any order of dimensions in memory.
    The numbers of a head are neighbours. A scale is a head of one float32. Of an array of each request, slots
    are blocks, heads are positions, and each position has one head."""
    block_size: int
    """Tokens."""
    layout: KVLayout
    device: str
    """Its name in torch."""
    rank: int = 0
    ranks: int = 1
    layers_ready: Callable[[], int] = lambda: 0
    """With several ranks: how many layers are ready so far, over all steps that hand over KV. All ranks count
    the same layers."""
    window_blocks: "np.ndarray | None" = None
    """int32, by block: the block in arrays with windows, which the engine changes. 0: none, so that what is
    written there is lost. None: it is the same, or block tables have those of an array already."""
    num_tables: int = 1
    """Block tables of a request. They are equally long, and lie behind each other in its block ids."""
    tables: "Sequence[Mapping[int, int]]" = ()
    """Of each array of the layout, by layer, the number of its table. Of an array of each request, the slot
    comes first there. Empty: there is one table, and slots are given apart."""
    block_sizes: Sequence[int] = ()
    """Tokens of a block, of each array of the layout. Empty: `block_size`."""

    @property
    def sums(self) -> bool:
        """As in `TransferConfig`: a kernel that copies slices on a GPU also sums them."""
        return self.device.startswith("cuda")

    @property
    def heads(self) -> Sequence[Range]:
        """The heads of this rank, of each array of the layout."""
        return [array.heads_of(self.rank, self.ranks) for array in self.layout.arrays]

    def block_size_of(self, number: int) -> int:
        """Tokens of a block of an array of the layout."""
        return self.block_sizes[number] if self.block_sizes else self.block_size

    def holds(self, block_ids: Sequence[int], num_tokens: int) -> bool:
        """Whether these have so many tokens, where blocks are largest. A slot of states has any number."""
        arrays = enumerate(self.layout.arrays)
        sizes = [self.block_size_of(number) for number, array in arrays if array.per_token]
        return not sizes or num_tokens <= len(block_ids) // self.num_tables * max(sizes)

    def part(self, piece: Piece, entries: int) -> Range:
        """Where the blocks of a slice lie, or its slot, in `entries` block ids with a slot behind them."""
        per_token, _ = self.layout.sizes[piece.array]
        if not self.tables:
            return (0, entries - 1) if per_token else (entries - 1, entries)
        each = (entries - 1) // self.num_tables
        start = self.tables[piece.array][piece.layer] * each
        return start, start + (each if per_token else 1)

    def blocks(self, piece: Piece, block_ids: Sequence[int], state_slot: int) -> tuple[Sequence[int], int]:
        """The blocks with the positions of a slice, and where it begins in the first one; or its slot, and
        0."""
        array, (start, stop) = self.layout.arrays[piece.array], self.part(piece, len(block_ids) + 1)
        if not array.per_token:
            return [state_slot if start == len(block_ids) else block_ids[start]], 0
        size = self.block_size_of(piece.array)
        first, offset = divmod(piece.token_start, size)
        last = -(-(piece.token_start + piece.token_count) // size)
        blocks = block_ids[start + first : min(start + last, stop)]
        if array.window is not None and self.window_blocks is not None:
            blocks = self.window_blocks[[*blocks]].tolist()
        return blocks, offset


class Released(Local, frozen=True):
    """Nothing reads the prefill's blocks any more. Reported exactly once for each `open` and `serve`."""

    prefill_id: bytes  # or the pin id given to `serve`
    reason: str  # "acked" | "deadline" | "reused" (its id) | what close() was given
    owner: Any = None


class InjectStats(Arrival, frozen=True):
    """And how it got into its blocks."""

    fetch_at: float  # fetch()
    scatter_at: float  # the first copy into the blocks was enqueued; with no frame it is injected_at
    injected_at: float  # the last copy is over

    @property
    def transfer_seconds(self) -> float:
        return self.last_frame_at - self.first_frame_at

    @property
    def injection_seconds(self) -> float:
        return self.injected_at - self.scatter_at

    @property
    def exposed_seconds(self) -> float:
        """The part of the transfer that the prefill's computation did not hide."""
        return self.injected_at - self.commit_at

    @property
    def fetch_seconds(self) -> float:
        return self.injected_at - self.fetch_at

    @property
    def hidden_share(self) -> float:
        """1 − exposed ÷ transfer time, within 0…1."""
        if self.transfer_seconds <= 0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - self.exposed_seconds / self.transfer_seconds))


class Injected(Local, frozen=True):
    """Every position of the fetch is in its block, verified. The request may join the next step."""

    decode_id: bytes
    first_token: FirstToken
    stats: InjectStats
    owner: Any = None


@dataclass(frozen=True, slots=True)
class Began:
    """KV of the end of a range of `fetch_ranges` has come. So the step that computes this end has started."""

    decode_id: bytes
    stop: int
    owner: Any = None


class FetchFailed(Local, frozen=True):
    """The KV will not come from this prefill. Nothing writes into the blocks; fetch() may be called again."""

    decode_id: bytes
    reason: str
    owner: Any = None


class Closed(Local, frozen=True):
    """Reported after cancel(): nothing writes into the blocks any more."""

    decode_id: bytes
    owner: Any = None
