"""Finds the gRPC addresses of the workers. The workers describe everything else themselves."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25


class Discovery(Protocol):
    """A source of worker addresses."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yields the whole set of addresses, first at once and then after each change."""


class FileDiscovery:
    """Workers that are always there, and those of a file, which a supervisor replaces atomically. It has one
    address per line; `#` begins a comment.

    Before the file exists only `addresses` are known. If the file is removed, the last set stays, so that a
    router serves on without its supervisor.
    """

    def __init__(self, path: str | None, addresses: tuple[str, ...] = ()) -> None:
        self._path = None if path is None else Path(path)
        self._always = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        seen: tuple[int, ...] | None = ()  # None: it cannot be read, as the log says
        current = self._always
        yield current
        while self._path is not None:
            try:
                status = self._path.stat()
                version = (status.st_ino, status.st_mtime_ns, status.st_size)
                if version != seen:
                    found = self._always | _parse(self._path.read_text(), self._path)
                    seen = version
                    if found != current:
                        current = found
                        yield current
            except (OSError, UnicodeDecodeError) as error:
                if seen is not None:
                    reason = error.strerror if isinstance(error, OSError) else error
                    text = "workers file %s cannot be read (%s): the router keeps the last list"
                    log.warning(text, self._path, reason)
                    seen = None
            await asyncio.sleep(POLL_SECONDS)


def is_address(text: str) -> bool:
    """Whether this is HOST:PORT. An IPv6 address stands in brackets, or it would run on into the port."""
    host, _, port = text.rpartition(":")
    whole = ":" not in host or (host.startswith("[") and host.endswith("]"))
    return bool(host) and "/" not in host and whole and port.isdecimal() and 1 <= int(port) <= 65_535


def _parse(text: str, path: Path) -> frozenset[str]:
    lines = dict.fromkeys(filter(None, (line.partition("#")[0].strip() for line in text.splitlines())))
    wrong = [line for line in lines if not is_address(line)]
    for line in wrong:
        log.warning("workers file %s: %r is left out, since it is not HOST:PORT or [IPV6]:PORT", path, line)
    return frozenset(lines).difference(wrong)
