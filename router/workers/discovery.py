"""Which workers there are. Only gRPC addresses: all else comes from the worker's own Describe."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25


class Discovery(Protocol):
    """Where a router learns of workers."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """The whole set of addresses: now, and whenever it changes."""
        ...


class StaticDiscovery:
    """Workers named once and for all."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses


class FileDiscovery:
    """A file with one address a line (`#` begins a comment), replaced atomically by whoever supervises.

    Without the file there are no workers; when it is taken away, the last ones stay: a router keeps serving
    while its supervisor is gone.
    """

    def __init__(self, path: str, addresses: tuple[str, ...] = ()) -> None:
        self._path = Path(path)
        self._always = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        seen: tuple[int, int, int] | None = None
        current = self._always
        yield current
        while True:
            try:
                status = self._path.stat()
                version = (status.st_ino, status.st_mtime_ns, status.st_size)
                if version != seen:
                    seen = version
                    found = self._always | _parse(self._path.read_text())
                    if found != current:
                        current = found
                        yield current
            except (OSError, UnicodeDecodeError) as error:
                if seen is not None:
                    log.warning("workers file %s cannot be read (%s): the last list stays", self._path, error)
                    seen = None
            await asyncio.sleep(POLL_SECONDS)


def _parse(text: str) -> frozenset[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(line for line in lines if line)
