"""Pages of `DeviceMemory` that outlive the process that made them: their files wait for the next process."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.system.device_memory import DeviceMemory, Exported, Page

MOST_PAGES = 64
"""Of a dtype of the cache, and of the weights: each is a file. An engine that stands by has one page of each
dtype of the cache more."""


class CannotShareError(ValueError):
    """Of an engine that would stand by: it needs other pages than the engine that serves has. It can start
    alone."""


class KeptPages(NamedTuple):
    """Pages of one size, in the order of their addresses."""

    page_bytes: int
    pages: Sequence[Exported]


class Shelf(NamedTuple):
    """Where files of pages wait for engines."""

    put: Callable[[Sequence[KeptPages]], None]
    """The engine that makes the pages calls it. Nothing is there before. The files stay the caller's."""
    pages: Callable[[], Sequence[KeptPages]]
    """Copies of what `put` was given. The caller owns the files. Empty: nothing yet."""
    clear: Callable[[], None]
    """Lets go of what `put` was given, which may be called again then."""


class KeptMemory(NamedTuple):
    """Of one rank, for engines that follow each other."""

    table: int
    """A descriptor of memory of the host that never shrinks, empty at first."""
    cache: Shelf
    """Of KV and states (`engine.execution.kept_cache`)."""
    weights: Shelf
    """Of weights (`engine.execution.shared_weights`)."""


def exported(memory: DeviceMemory, pages: Sequence[Page]) -> KeptPages:
    """The caller owns the files."""
    return KeptPages(memory.page_bytes, [memory.export(page) for page in pages])


def adopted(memory: DeviceMemory, kept: KeptPages) -> list[Page]:
    """The pages of another process. Closes its files. Raises `MemoryError`."""
    try:
        return [page for each in kept.pages for page in memory.adopt(each, 1)]
    finally:
        close(kept)


def close(*kept: KeptPages) -> None:
    """Closes the files."""
    for each in kept:
        for page in each.pages:
            os.close(page.fd)
