"""Lines of files that users name. A device such as /dev/zero has lines without an end."""

from collections.abc import Iterator
from typing import IO

LONGEST_LINE = 200 << 20
"""Bytes. OpenAI allows as many for a whole file of a batch."""


def bounded_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields each line with its number, which begins at 1. Raises ValueError for one that is too long."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"line {number}: is longer than {LONGEST_LINE} bytes")
        yield number, line
