"""Changes of files, in an order that a kill or a loss of power cannot turn into lost data.

A description is replaced at once: after a kill the old one is there, or the new one. What a description tells
of is on the disk before it.
"""

import os
from pathlib import Path

SYNC_BYTES = 8 << 20
"""Appended bytes that may wait for the disk: so `sync` never takes long."""


def append(path: Path, data: bytes) -> None:
    """Appends all of `data`. Raises OSError; then the file is as it was."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        before = os.lseek(file, 0, os.SEEK_END)
        try:
            _write(file, data)
            if before // SYNC_BYTES != (before + len(data)) // SYNC_BYTES:
                os.fsync(file)
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def make(folder: Path) -> None:
    """Makes a directory, if there is none."""
    if not folder.is_dir():
        os.mkdir(folder, 0o700)
        sync(folder.parent)


def cut(path: Path, size: int) -> None:
    """Makes a file shorter."""
    os.truncate(path, size)


def sync(path: Path) -> None:
    """Returns when the content of a file, or the names in a directory, are on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def replace(path: Path, data: bytes) -> None:
    """Makes `data` the content of a file. Raises OSError; then the old content, or `data`, is there."""
    new = path.with_suffix(".new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        try:
            _write(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(new, path)
    except OSError:
        remove(new)
        raise
    sync(path.parent)


def remove(path: Path) -> int:
    """Removes a file, if there is one. Returns its size. Raises OSError."""
    if (removed := size(path)) is not None:
        os.unlink(path)
    return removed or 0


def size(path: Path) -> int | None:
    """Bytes of a file. None: there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
