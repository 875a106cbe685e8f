"""The load of one decode worker: its last report, and what this router sent it since."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class FreeCapacity(NamedTuple):
    """Free capacity of all decode workers together."""

    slots: float
    """Requests that fit into their batches."""
    positions: float
    """KV positions."""


@dataclass(slots=True)
class DecodeLoad:
    """Owned by the connection to the worker, or by a simulated worker.

    Attributes:
        blocks_free: as reported, less the blocks of later reservations of this router.
        running: requests that the worker has or will have. Those of other routers are as reported.
        full: the worker refused a reservation, and has not reported free capacity since.
        own: the part of `running` that this router sent.
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
        self.running = max(self.own, running)  # the report misses requests that are on their way

    def sent(self, tokens: int) -> None:
        """A reservation of `tokens` positions was sent. `ended` undoes it."""
        self.blocks_free -= self._blocks(tokens)
        self.running += 1
        self.own += 1

    def ended(self, tokens: int) -> None:
        self.blocks_free += self._blocks(tokens)
        self.running -= 1
        self.own -= 1
        self.full = False

    @property
    def pressure(self) -> float:
        """The higher of two shares: KV blocks in use, and seats in use. 0 is idle, 1 is full."""
        blocks = 1 - self.blocks_free / self.blocks_total if self.blocks_total else 1.0
        batch = self.running / self.max_running if self.max_running else 1.0
        return max(blocks, batch)

    def fits(self, tokens: int) -> bool:
        """Whether a reservation of `tokens` positions may be sent.

        One request more than the batch has slots may be sent. If the worker refuses it, its report tells the
        autoscaler that more capacity is needed.
        """
        if self.full or self.running > self.max_running:
            return False
        return self.blocks_free * self.block_size >= tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def free_capacity(loads: Iterable[DecodeLoad]) -> FreeCapacity:
    slots = positions = 0
    for load in loads:
        slots += max(0, load.max_running - load.running)
        positions += max(0, load.blocks_free) * load.block_size
    return FreeCapacity(slots, positions)
