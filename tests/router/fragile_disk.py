"""Stands for `os` in `baton.router.batches.disk`: ends the router at a step, or is full."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec


class Killed(BaseException):
    """The router ends here. It is no Exception, as no code of the router runs after a kill."""


class Disk:
    """The functions of `os` that change files. Ends the router at one of them, or refuses to write.

    `unsynced` has the files whose last bytes may be lost with the power.
    """

    def __init__(self, steps: float) -> None:
        self.steps = steps
        self.full = False
        self.unsynced: set[str] = set()
        self._paths: dict[int, str] = {}

    def step(self) -> None:
        if self.steps <= 0:
            raise Killed
        self.steps -= 1

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self.step()
            if self.full and not path.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = os.open(path, flags, mode)
        self._paths[file] = str(path)
        return file

    def write(self, file: int, data: memoryview) -> int:
        self.unsynced.add(self._paths[file])
        if self.steps <= 0 or self.full:
            os.write(file, data[: len(data) // 2])
        self.step()
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, data[: 256 + len(data) // 2])

    def fsync(self, file: int) -> None:
        self.step()
        self.unsynced.discard(self._paths[file])

    def replace(self, path: Path, target: Path) -> None:
        self.step()
        told = msgspec.json.decode(path.read_bytes())
        ids = {told["id"], told.get("output_file_id"), told.get("error_file_id")}
        lost = {Path(each).stem for each in self.unsynced} & ids
        assert not lost, "what a description tells of may be lost with the power"
        os.replace(path, target)

    def unlink(self, path: Path) -> None:
        self.step()
        os.unlink(path)
        self.unsynced.discard(str(path))

    def mkdir(self, path: Path, mode: int) -> None:
        self.step()
        os.mkdir(path, mode)

    def ftruncate(self, file: int, size: int) -> None:
        self.step()
        os.ftruncate(file, size)

    def truncate(self, path: Path, size: int) -> None:
        self.step()
        os.truncate(path, size)

    def __getattr__(self, name: str) -> Any:
        """What changes nothing: the rest of `os`."""
        assert name in {"close", "lseek", "stat", "SEEK_END"} or name.startswith("O_")
        return getattr(os, name)
