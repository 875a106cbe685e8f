"""Files of a checkpoint that stand for tensors in the GPU memory of a trainer on the same host.

    written ─▶ the trainer copies the tensors to memory of the host ─▶ removed
       └─────▶ the trainer ends ─▶ abandoned: its memory is gone

`baton.weights` writes them, and `engine.loader.device_file` says what they hold. The trainer has a lock on
each, which the kernel takes back with the trainer's process. So any process that can read the file sees
whether there is something to wait for.
"""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".cuda.json"


def write(path: Path, text: str) -> int:
    """Returns the descriptor that has the lock. The caller closes it once the file is removed."""
    new = path.with_name(f".{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with open(fd, "w", closefd=False) as file:
            file.write(text)
        new.rename(path)  # no process sees it without its lock
    except BaseException:
        os.close(fd)
        raise
    return fd


def found_in(files: Iterable[Path]) -> list[Path]:
    """Those of these files that stand for tensors of a trainer. None: all are in memory of the host."""
    return [file for file in files if file.name.endswith(SUFFIX)]


def check_runs(files: Iterable[Path]) -> None:
    """Raises `ValueError` if the trainer of one of these files has ended, or if a file cannot be read."""
    for file in files:
        try:
            abandoned = _is_abandoned(file)
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
        if abandoned:
            raise ValueError(
                f"{file}: the trainer has ended before it copied its tensors to memory of the host; update "
                "the weights again"
            )


def _is_abandoned(file: Path) -> bool:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # it was removed meanwhile
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.fstat(fd).st_nlink > 0
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
