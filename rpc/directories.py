"""Directories that the user names: makes them, and says why a process cannot write there."""

from pathlib import Path


def make_directory(flag: str, path: Path) -> None:
    """Makes the directory and its parents. `flag`: its option. Raises ValueError that names both."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(cannot_write(flag, path, error)) from error


def cannot_write(flag: str, path: Path, error: OSError) -> str:
    """Returns the message for the user."""
    return f"{flag} {path}: {error.strerror}; name a directory that you may write to"
