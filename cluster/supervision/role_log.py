"""The log of a role: a file to which all processes of the role append. It must never end the role.

A full disk loses lines. Each process counts its own lost lines (`system.logs`). Here the user is
told meanwhile.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
from collections import deque
from pathlib import Path
from typing import BinaryIO

LOG_BYTES = 16 << 20  # size at which a log is rotated; the one before it is kept
CHECK_SECONDS = 2.0
LAST_LINES = 20  # shown when a role fails to start
MOST_ERRORS = 4  # of the lines above them
ERROR = re.compile(r"\w*(Error|Exception): ")

log = logging.getLogger(__name__)


def open_log(path: Path) -> BinaryIO:
    """Opens a log for appending. If that fails, the role runs without a log until its next start."""
    try:
        return _open_private(path)
    except OSError as error:
        log.warning("%s: %s; until its next start the role has no log", path, error.strerror)
        return open(os.devnull, "ab")


async def keep_bounded(path: Path, most: int = LOG_BYTES, interval: float = CHECK_SECONDS) -> None:
    """Rotates the log when it has `most` bytes, and warns when its disk is full, until cancelled."""
    warned = False
    while True:
        await asyncio.sleep(interval)
        try:
            await asyncio.to_thread(_check, path, most)
            warned = False
        except FileNotFoundError:
            pass  # the role runs without a log
        except OSError as error:
            if not warned:
                log.warning("%s: %s; log lines are lost until this is mended", path, error.strerror)
            warned = True


def _check(path: Path, most: int) -> None:
    if path.stat().st_size >= most:
        _rotate(path)
    if not os.statvfs(path).f_bavail:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _rotate(path: Path) -> None:
    """Moves the lines of the log to PATH.1.

    The role keeps its file open, so the file is copied and emptied. Lines that come between the two are lost.
    """
    before = path.with_name(f"{path.name}.1")
    before.unlink(missing_ok=True)  # first, since the copy may need its room
    with contextlib.ExitStack() as undo:
        undo.callback(before.unlink, missing_ok=True)
        with path.open("rb") as lines, _open_private(before) as copy:
            shutil.copyfileobj(lines, copy)
        undo.pop_all()
    os.truncate(path, 0)


def _open_private(path: Path) -> BinaryIO:
    """Opens a file for appending. Only its owner can read it, even if it existed with other permissions."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return os.fdopen(fd, "ab")


def end_of(path: Path) -> str:
    """The end of a log. First come errors that stand before it: where one process waits for another, the end
    says that the other failed, and the cause is above."""
    last, errors = deque[str](maxlen=LAST_LINES), deque[str](maxlen=MOST_ERRORS)
    try:
        with path.open(errors="replace") as lines:
            for line in lines:
                if len(last) == LAST_LINES and ERROR.match(last[0]) and last[0] not in errors:
                    errors.append(last[0])
                last.append(line)
    except FileNotFoundError:
        return ""
    parts = {"Errors above the end": errors, "The end": last}
    return "".join(
        f"{title} of {path.name}:\n" + "".join(f"  {line}" for line in lines)
        for title, lines in parts.items()
        if lines
    )
