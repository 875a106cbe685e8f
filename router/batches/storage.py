"""Files and batches in a directory: `DIR/OWNER/ID.json` describes one, `DIR/OWNER/ID.jsonl` is its content.

A batch appends its results to the contents of two files, whose ids follow from its own. When it ends, its own
description is written first, and then those of these files. After a kill between the two the next router
finds an ended batch, and describes its files.

The memory decides. A batch ends and a file is removed there first, and then on the disk. What a full disk
does not take is written later (`tidy`). Only what is new is refused then.

An owner is named by the digest of an API key, so a key never sees what another one made. All methods that
touch the disk run in one thread (`Storage.call`), so none runs at the same time as another one, and the event
loop never waits for a disk. What takes long runs in slices (`Storage.in_slices`).
"""

import asyncio
import fcntl
import logging
import os
import re
from collections.abc import Callable, Container, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from baton.router.admission.slots import Slots
from baton.router.batches import disk
from baton.router.batches.objects import (
    MAX_SECONDS,
    BatchObject,
    FileObject,
    file_object,
    result_id,
    timestamp,
)
from baton.router.errors import BodyTooLarge, InvalidRequest, NotFound, RateLimited

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 200 << 20
MAX_FILES = 1000
"""Of an owner; and as many batches."""
SLICE_BYTES = 1 << 20
"""Of lines that are read in a slice."""
LINE_BYTES = 1 << 10
"""A shorter line counts as so many."""
_FILE = re.compile(r"((?:file|batch)-[0-9a-f]{32})\.(json|jsonl|new)")
_OWNER = re.compile(r"any|[0-9a-f]{32}")
T = TypeVar("T")
Described = FileObject | BatchObject


class Storage:
    """Owns a directory. `open` before anything else; `close` at the end."""

    def __init__(self, directory: Path, most_bytes: int, owners: Callable[[], int]) -> None:
        """`most_bytes`: of all files. `owners`: returns how many API keys share them equally."""
        self._directory = directory
        self._most_bytes = most_bytes
        self._owners = owners
        self._thread = ThreadPoolExecutor(1, "batches")
        self._turns = Slots(1)  # of the thread
        self._known: dict[str, dict[str, Described]] = {}
        self._bytes: dict[str, int] = {}
        self._unsaved: dict[tuple[str, str], None] = {}
        """Owners and ids of what is not on the disk as it is in memory."""
        self._lock: int | None = None

    async def call(self, owner: str, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a method of this object, or what it is given, in the thread of the directory. Owners take
        turns by the time of their calls. The empty owner is the router."""
        in_thread = asyncio.get_running_loop().run_in_executor
        return await self._turns.run(owner, partial(in_thread, self._thread, function, *arguments))

    async def in_slices(self, owner: str, work: Generator[None, None, T]) -> T:
        """Runs a generator in the thread. Other calls run at each of its yields. Returns its result."""
        ended: list[T] = []

        def result() -> Iterator[None]:
            ended.append((yield from work))

        slices = result()
        while not ended:
            await self.call(owner, next, slices, None)
        return ended[0]

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._save_all()
        if self._lock is not None:
            os.close(self._lock)

    # ------------------------------------------------------------ in the thread

    def open(self) -> None:
        """Reads what is there. Raises ValueError for a directory that is unusable, or another router's."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in self._directory.iterdir():
                if folder.is_dir() and _OWNER.fullmatch(folder.name):
                    self._open_folder(folder)
        except BlockingIOError:
            raise ValueError(f"--batch-dir {self._directory}: another router uses it") from None
        except OSError as error:
            raise ValueError(f"--batch-dir {self._directory}: {error.strerror}") from error

    def _open_folder(self, folder: Path) -> None:
        owner, described, kept = folder.name, list[Described](), set[str]()
        paths = [path for path in folder.iterdir() if _FILE.fullmatch(path.name)]
        for path in paths:
            if path.suffix != ".json":
                continue
            kind = FileObject if path.stem.startswith("file") else BatchObject
            kept |= {path.stem, result_id(path.stem, "output"), result_id(path.stem, "error")}
            try:
                described.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (msgspec.DecodeError, OSError) as error:
                log.error("%s cannot be read, and is left out: %s", path, error)
        described.sort(key=lambda each: each.created_at)
        known = self._known[owner] = {each.id: each for each in described}
        for batch in described:
            if not isinstance(batch, BatchObject) or not batch.ended:
                continue
            for file in self._result_files(owner, batch):
                if file.id not in known:  # the router ended before the file was described
                    known[file.id] = file
                    self._changed(owner, file.id)
        for path in paths:
            if path.suffix == ".new" or path.stem not in kept:
                disk.remove(path)  # of a description or an upload that was cut
        self._bytes[owner] = sum(disk.size(path) or 0 for path in folder.glob("*.jsonl"))

    def owners(self) -> list[str]:
        return list(self._known)

    def tidy(self, owner: str) -> None:
        """Forgets what has expired, and writes what the disk did not take before."""
        self.all_of(owner, FileObject)
        self._save_all()

    def all_of(self, owner: str, kind: type[T]) -> list[T]:
        """All of one kind, the oldest first. Forgets what has expired."""
        known, readers = self._known.get(owner, {}), self._readers(owner)
        for each in list(known.values()):
            if _expired(each, readers):
                self.forget(owner, each.id)
        return [each for each in known.values() if isinstance(each, kind)]

    def get(self, owner: str, id: str, kind: type[T]) -> T:
        """Raises NotFound, also for what another owner has."""
        described = self._known.get(owner, {}).get(id)
        if not isinstance(described, kind) or _expired(described, self._readers(owner)):
            raise NotFound(f"there is no {'file' if kind is FileObject else 'batch'} {id[:80]!r}")
        return described

    def _readers(self, owner: str) -> dict[str, BatchObject]:
        """By file the batches that read it, and have not ended."""
        batches = (each for each in self._known.get(owner, {}).values() if isinstance(each, BatchObject))
        return {batch.input_file_id: batch for batch in batches if not batch.ended}

    def put(self, owner: str, described: Described) -> None:
        """Keeps a new description, or a change of one.

        Raises RateLimited for one too many, and BodyTooLarge if a full disk does not take a new one.
        """
        known = self._known.setdefault(owner, {})
        if described.id in known:
            self._changed(owner, described.id)
            return
        if len(self.all_of(owner, type(described))) >= MAX_FILES:
            raise RateLimited(
                f"this API key has {MAX_FILES} of these; delete some, or wait until they expire"
            )
        known[described.id] = described
        try:
            if isinstance(described, FileObject):
                disk.sync(self._path(owner, described.id, "jsonl"))
            self._save(owner, described.id)
        except OSError as error:
            self.forget(owner, described.id)
            raise _full(error) from error

    def _changed(self, owner: str, id: str) -> None:
        """Brings what happened in memory to the disk, now or later."""
        try:
            self._save(owner, id)
        except OSError as error:
            if (owner, id) not in self._unsaved:
                log.error("%s is not on the disk as it is in memory; the router tries again: %s", id, error)
            self._unsaved[owner, id] = None

    def _save_all(self) -> None:
        for owner, id in list(self._unsaved):
            self._changed(owner, id)

    def _save(self, owner: str, id: str) -> None:
        """Makes the disk as the memory is. Raises OSError."""
        if (described := self._known.get(owner, {}).get(id)) is not None:
            disk.replace(self._path(owner, id, "json"), msgspec.json.encode(described))
        else:  # without its description it is gone, also after a kill before its content is removed
            disk.remove(self._path(owner, id, "json"))
            self._count(owner, -disk.remove(self._path(owner, id, "jsonl")))
        self._unsaved.pop((owner, id), None)

    def _count(self, owner: str, size: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + size

    def delete(self, owner: str, id: str) -> None:
        """Forgets a file. Raises NotFound, and InvalidRequest while a batch reads it."""
        self.get(owner, id, FileObject)
        if (batch := self._readers(owner).get(id)) is not None:
            raise InvalidRequest(f"the batch {batch.id} reads this file; cancel it first")
        self.forget(owner, id)

    def forget(self, owner: str, id: str) -> None:
        """Removes what is described, and an upload that is not described yet."""
        self._known.get(owner, {}).pop(id, None)
        self._changed(owner, id)

    def append(self, owner: str, id: str, data: bytes) -> None:
        """Appends to a content. Raises BodyTooLarge where the owner's share or the disk is full."""
        share = self._most_bytes // max(1, self._owners())
        used = self._bytes.get(owner, 0)
        if used + len(data) > share:
            raise BodyTooLarge(
                f"files of this API key have {used} bytes, of {share} (--advanced.batch-dir-size)"
            )
        try:
            disk.append(self._path(owner, id, "jsonl"), data)
        except OSError as error:
            raise _full(error) from error
        self._count(owner, len(data))

    def finish(self, owner: str, batch: BatchObject, status: str) -> None:
        """Ends a batch, and describes the files of its results."""
        for kind in ("output", "error"):
            id = result_id(batch.id, kind)
            try:
                path = self._path(owner, id, "jsonl")
                if disk.size(path):
                    setattr(batch, f"{kind}_file_id", id)
                    disk.sync(path)
            except OSError as error:
                log.error("%s of %s: %s", kind, batch.id, error)
        batch.now(status)
        files = list(self._result_files(owner, batch))
        self._known[owner] |= {file.id: file for file in files}
        self._changed(owner, batch.id)
        for file in files:
            self._changed(owner, file.id)

    def _result_files(self, owner: str, batch: BatchObject) -> Iterator[FileObject]:
        """Describes the contents that an ended batch has made, and that no client has deleted."""
        ended_at = getattr(batch, f"{batch.status}_at")
        seconds = int((batch.output_expires_after or {"seconds": MAX_SECONDS})["seconds"])
        for kind, id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
            if id is not None and (size := disk.size(self._path(owner, id, "jsonl"))) is not None:
                name = f"{batch.id}_{kind}.jsonl"
                yield file_object(id, size, name, "batch_output", ended_at, seconds)

    def content(self, owner: str, id: str) -> Path:
        """The path of a file's content. Raises NotFound."""
        self.get(owner, id, FileObject)
        return self._path(owner, id, "jsonl")

    def results(
        self, owner: str, batch: str, kind: Literal["output", "error"]
    ) -> Generator[None, None, set[str]]:
        """The `custom_id`s that have a result, in slices. Removes what follows the last whole line."""
        path, custom_ids, end = self._path(owner, result_id(batch, kind), "jsonl"), set[str](), 0
        if (size := disk.size(path)) is None:
            return custom_ids
        with path.open("rb") as file:
            read = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    custom_ids.add(msgspec.json.decode(line, type=_Result).custom_id)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                end += len(line)
                if (read := read + max(len(line), LINE_BYTES)) >= SLICE_BYTES:
                    read = 0
                    yield
        if end < size:
            disk.cut(path, end)
            self._count(owner, end - size)
        return custom_ids

    def _path(self, owner: str, id: str, kind: Literal["json", "jsonl"]) -> Path:
        assert _FILE.fullmatch(f"{id}.{kind}")
        folder = self._directory / owner
        disk.make(folder)
        return folder / f"{id}.{kind}"


class _Result(msgspec.Struct):
    """A line of results."""

    custom_id: str


def _expired(described: object, readers: Container[str]) -> bool:
    """A batch stays until it has ended, and so does the file that it reads."""
    if isinstance(described, BatchObject):
        return described.ended and described.created_at + MAX_SECONDS < timestamp()
    assert isinstance(described, FileObject)
    return described.expires_at < timestamp() and described.id not in readers


def _full(error: OSError) -> BodyTooLarge:
    return BodyTooLarge(f"the router cannot keep more files: {error.strerror}")
