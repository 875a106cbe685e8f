"""Copies of whole blocks of a KV cache, for the tiers below the device: memory of the host, and its disk.

A tier of the engine decides what is copied, loaded and dropped. A store here copies: `host_store` to memory
of the host (`cuda_store` from a GPU), `ranked_store` on all ranks of an engine, `disk_store` to a file.

A *place* has all layers of one block, as this rank holds them. A block gets a checksum when it is saved. When
it is loaded, the checksum must match. If it does not, the block's bytes are undefined.
"""

from collections.abc import Sequence
from typing import Protocol

Pair = tuple[int, int]
"""A block and a place."""


class BlockStore(Protocol):
    """The base of stores. The caller has one thread. It owns blocks and places from the start of their copy
    to its end."""

    batch: int
    """Blocks that are worth copying together."""
    num_places: int
    """Places that it may have. It falls to `ready` if no more memory can be had."""
    ready: int
    """Places that have memory: the first ones. It only grows."""

    def expect(self, places: int) -> None:
        """So many places are in use: more should soon be ready. Does not wait for them. Does nothing if all
        are ready from the start."""
        return

    @property
    def room(self) -> int:
        """How many blocks may be copied now."""

    def copy(self, pairs: Sequence[Pair], *, is_load: bool) -> None:
        """Starts to copy blocks to places, or places into blocks. No step writes a block that is saved, or
        the caller does not use its place. No step uses a block that is loaded."""

    def ended(self) -> list[bool]:
        """Of each block with a copy that is over, in the order of the copies: whether it is whole. A block
        that is saved is, unless a disk fails."""

    def close(self) -> None:
        """Waits for the copies, and frees the places."""


class HostStore(BlockStore, Protocol):
    """The base of stores in the memory of the host."""

    sums: list[int | None]
    """The checksum of each place. None: a block that is loaded from there is not whole."""

    def have_all(self) -> None:
        """Waits until all places are ready, or no more memory can be had. Does nothing if they are."""
        return

    def memory(self, place: int) -> memoryview:
        """The bytes of a place. No copy uses them while the caller does."""
