"""The pools of a cache, and what records of their places need: room of their own, and sums over the memory
that they are of."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple


class Pool(IntEnum):
    """What a place has."""

    BLOCKS = 0
    SLOTS = 1
    """States of a request, or a copy of them."""
    WINDOWS = 2
    """A block of layers with windows, if these have blocks of their own."""


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
