"""Directories that a user names, and what the user is told when nothing can be written there."""

import tempfile
from pathlib import Path


def make_directory(flag: str, path: Path) -> None:
    """Makes the directory and its parents. `flag`: its option. Raises ValueError that names both if no file
    can be made there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(cannot_write(flag, path, error)) from error


def cannot_write(flag: str, path: Path, error: OSError) -> str:
    """Returns the message for the user."""
    return f"{flag} {path}: {error.strerror}; name a directory that you may write to"
