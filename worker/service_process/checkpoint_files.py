"""The files of the checkpoint that a worker's weights came from. They stay readable without their names.

    the engine has read a path ─▶ its files are opened ─▶ other workers read them, and the next engine process
    another worker has it      ─▶ its files are copied to memory, the engine reads them ─▶ likewise

So a worker that starts later gets the weights from any worker that has them, also when the trainer has
removed them, or when its host never had them. The engine finds the files as links in a directory. It checks
what it reads from there as it does with any checkpoint.

Weights on GPUs of a trainer have files with handles (`engine.trainer_files`). The trainer changes that
memory later, and leaves a copy in memory of the host at the path. So these files are not opened here. Only an
update that the trainer itself makes reads its memory. A worker or an engine process that comes later waits
for the copy.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Self

from baton.engine import trainer_files
from baton.engine.gguf_header import parts_of
from baton.rpc import worker_pb2 as pb
from baton.system import available_memory
from baton.worker.service_process.backend import Refused

KINDS = (".json", ".safetensors", ".gguf")
SECOND_FORMAT = "consolidated"
"""Files with the same weights once more begin so."""
PART = 1 << 20
"""Bytes of a message. The event loop copies it."""
MOST_FILES, MOST_NAME = 2048, 255


class CheckpointFiles:
    """One checkpoint. `close`, or the end of the process, gives descriptors and memory back when no process
    reads them any more.

    Attributes:
        path: what an engine process of this worker opens.
    """

    def __init__(self, run_dir: str | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="baton-checkpoint-", dir=run_dir)
        self.path = self._directory.name
        self._files: dict[str, int] = {}

    @classmethod
    def opened(cls, source: Path, run_dir: str | None) -> Self:
        """The files of a checkpoint on this host: a directory, or a file with its other parts. Raises
        `OSError`."""
        files = cls(run_dir)
        try:
            names = sorted(source.iterdir()) if source.is_dir() else parts_of(source)
            if trainer_files.found_in(names):
                files.path = str(source)
                return files
            for file in names:
                if file.suffix in KINDS and not file.name.startswith(SECOND_FORMAT) and file.is_file():
                    files._add(file.name, os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            files.close()
            raise
        if not source.is_dir():
            files.path = str(Path(files.path, source.name))
        return files

    @classmethod
    async def received(cls, parts: AsyncIterator[pb.CheckpointPart], run_dir: str | None) -> Self:
        """Copies the files that another worker sends to memory. Raises Refused, or `OSError` if the
        system has no descriptor or no memory for them."""
        files, room, left, fd = cls(run_dir), available_memory(), 0, -1
        try:
            async for part in parts:
                if part.name:
                    _check(part, left, files._files)
                    room, left = room - part.size, part.size
                    if room < 0:
                        raise Refused(f"the weights need {-room >> 20} MiB of memory more than the host has")
                    fd = os.memfd_create("checkpoint", os.MFD_CLOEXEC)  # not `part.name`: it may be too long
                    files._add(part.name, fd)
                elif fd < 0 or not 0 < len(part.data) <= left:
                    raise Refused("the other worker sent bytes of no file")
                else:
                    await _write(fd, part.data)
                    left -= len(part.data)
            if left or not files._files:
                raise Refused("the other worker ended in the middle of a file")
        except BaseException:
            await asyncio.to_thread(files.close)  # to give 16 GB back takes a second
            raise
        if [name for name in files._files if name.endswith(".gguf")] == [*files._files]:
            files.path = str(Path(files.path, next(iter(files._files))))
        return files

    def _add(self, name: str, fd: int) -> None:
        self._files[name] = fd
        Path(self._directory.name, name).symlink_to(f"/proc/{os.getpid()}/fd/{fd}")

    async def send(self, write: Callable[[pb.CheckpointPart], Awaitable[object]]) -> None:
        """Sends all files. They may be closed meanwhile. Raises Refused, or `OSError` if no descriptor is
        left."""
        if not self._files:
            raise Refused(f"it has read the weights from a trainer's GPUs: they are at {self.path}")
        with contextlib.ExitStack() as opened:
            copies = dict[str, int]()
            for name, fd in self._files.items():
                copies[name] = os.dup(fd)
                opened.callback(os.close, copies[name])
            for name, fd in copies.items():
                at, size = 0, os.fstat(fd).st_size
                await write(pb.CheckpointPart(name=name, size=size))
                while at < size:
                    data = await asyncio.to_thread(os.pread, fd, min(PART, size - at), at)
                    if not data:
                        raise Refused(f"{name} has become shorter")
                    await write(pb.CheckpointPart(data=data))
                    at += len(data)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._directory.cleanup()


def _check(part: pb.CheckpointPart, left: int, files: dict[str, int]) -> None:
    """Raises Refused."""
    name = part.name
    if left:
        raise Refused("the other worker began a file in the middle of another")
    plain = name.isprintable() and "/" not in name and name[0] != "." and len(name.encode()) <= MOST_NAME
    is_kind = name.endswith(KINDS) and not name.endswith(trainer_files.SUFFIX)
    if not plain or not is_kind or name in files or len(files) == MOST_FILES:
        raise Refused(f"the other worker sent a file {name[:40]!r}, which no checkpoint has")


async def _write(fd: int, data: bytes) -> None:
    """Also if the caller is cancelled, it returns when the thread writes no more: the number of a descriptor
    that is closed may become that of a socket."""

    def write() -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]

    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait([writing])
