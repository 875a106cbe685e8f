"""Pages of `DeviceMemory` that outlive the process that made them: their files wait for the next process."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.machine.device_memory import Exported

MOST_PAGES = 64
"""Of a dtype: each is a file. An engine that stands by has one page of each dtype more."""


class KeptPages(NamedTuple):
    """Pages of one size, in the order of their addresses."""

    page_bytes: int
    pages: Sequence[Exported]


class KeptMemory(NamedTuple):
    """Of one rank, for engines that follow each other."""

    table: int
    """A descriptor of memory of the host that can be sealed, empty at first."""
    weights: int
    """The same for weights on a CPU (`engine.execution.shared_weights`)."""
    put: Callable[[Sequence[KeptPages]], None]
    """The engine that makes the pages calls it once. The files stay the caller's."""
    pages: Callable[[], Sequence[KeptPages]]
    """Copies of what `put` was given. The caller owns the files. Empty: nothing yet."""
