"""Sums over the KV of blocks, between the table of published blocks and the memory that they are in."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """Of sums that a device computes."""

    passed: Callable[[], bool]
    """Whether `wait` returns at once."""
    wait: Callable[[], Sequence[int]]
    """Returns the sums: 64 bits each."""


Sums = Callable[[Sequence[int]], Outcome]
"""Sums the KV of blocks, one number for each. It must not change meanwhile, or the sums are not used."""
