"""What records of kept memory need: room of their own, and sums over the memory that they are of."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """Of sums that a device computes."""

    passed: Callable[[], bool]
    """Whether `wait` returns at once."""
    wait: Callable[[], Sequence[int]]
    """Returns the sums: 64 bits each."""


Sums = Callable[[Sequence[int]], Outcome]
"""Sums what places of a pool have, one number for each. It must not change meanwhile, or the sums are not
used."""


class RecordMemory(NamedTuple):
    """Of the records of one pool."""

    table: memoryview
    """With room for a record of each place."""
    sums: Sums


class KeptParts(NamedTuple):
    """Of the records of all pools."""

    blocks: RecordMemory
    windows: RecordMemory | None
    """Window blocks. None: all layers have the same blocks."""
    slots: RecordMemory | None
    """States. None: no layer has states."""
