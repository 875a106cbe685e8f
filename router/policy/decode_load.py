"""What a router knows of one decode worker between two reports: what it reported, and what this router did
since."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class FreeRoom(NamedTuple):
    """What decode workers have free, all together."""

    seats: float
    """In their batches."""
    positions: float
    """Of KV."""


@dataclass(slots=True)
class DecodeLoad:
    """Owned by the connection to the worker (or a simulated one).

    Attributes:
        blocks_free: as reported, less what this router's reservations took since, plus what they gave back.
        running: requests that it has or will have, other routers' as last reported.
        full: it had no room for a reservation, and nothing was heard of room since.
        own: of `running`, those of this router.
    """

    worker: str
    block_size: int
    blocks_total: int
    max_running: int
    blocks_free: int = 0
    running: int = 0
    full: bool = False
    own: int = 0

    def reported(self, *, blocks_free: int, running: int) -> None:
        self.blocks_free, self.full = blocks_free, False
        self.running = max(self.own, running)  # what is on its way there was not counted

    def sent(self, tokens: int) -> None:
        """A reservation of so many positions is asked for. Ends with `ended` or `refused`."""
        self.blocks_free -= self._blocks(tokens)
        self.running += 1
        self.own += 1

    def ended(self, tokens: int) -> None:
        self.blocks_free += self._blocks(tokens)
        self.running -= 1
        self.own -= 1
        self.full = False

    def refused(self, tokens: int) -> None:
        """There was no room: nobody else is sent there for now."""
        self.ended(tokens)
        self.full = True

    @property
    def pressure(self) -> float:
        """The scarcer of memory and batch slots: 0 is idle, 1 is full."""
        blocks = 1 - self.blocks_free / self.blocks_total if self.blocks_total else 1.0
        batch = self.running / self.max_running if self.max_running else 1.0
        return max(blocks, batch)

    def has_room(self, tokens: int) -> bool:
        """One request more than the batch has seats may be sent. The worker's refusal is how an autoscaler
        learns that more room is wanted."""
        if self.full or self.running > self.max_running:
            return False
        return self.blocks_free * self.block_size >= tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def free_room(loads: Iterable[DecodeLoad]) -> FreeRoom:
    seats = positions = 0
    for load in loads:
        seats += max(0, load.max_running - load.running)
        positions += max(0, load.blocks_free) * load.block_size
    return FreeRoom(seats, positions)
