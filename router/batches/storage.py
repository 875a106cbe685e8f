"""Files and batches in a directory: `DIR/OWNER/ID.json` describes one, `DIR/OWNER/ID.jsonl` is its content.
The results of a batch that runs are in `ID.jsonl.out` and `ID.jsonl.err`.

An owner is named by the digest of an API key, so a key never sees what another one made. All methods that
touch the disk run in one thread (`Storage.call`), so none runs at the same time as another one, and the event
loop never waits for a disk. A description is replaced at once: a router that is killed leaves the old one, or
the new one.
"""

import asyncio
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from baton.router.admission.keys import ApiKey
from baton.router.errors import BodyTooLarge, InvalidRequest, NotFound, RateLimited

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 200 << 20
MAX_FILES = 1000
"""Of an owner; and as many batches."""
MAX_SECONDS = 30 * 24 * 3600
"""A file or an ended batch is kept so long."""
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
T = TypeVar("T")


class FileObject(msgspec.Struct, kw_only=True):
    """A file, as clients see it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch, as clients see it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    def now(self, status: str) -> None:
        """Changes the status, with the time of the change."""
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", timestamp())


Described = FileObject | BatchObject


def file_object(id: str, size: int, filename: str, purpose: Literal["batch", "batch_output"]) -> FileObject:
    """A file that is made now."""
    now = timestamp()
    return FileObject(
        id=id,
        bytes=size,
        created_at=now,
        expires_at=now + MAX_SECONDS,
        filename=filename,
        purpose=purpose,
    )


def timestamp() -> int:
    return int(time.time())  # noqa: TID251 - clients see it, and it outlives the process


def new_id(kind: Literal["file", "batch"]) -> str:
    return f"{kind}-{os.urandom(16).hex()}"


def owner_of(key: ApiKey) -> str:
    """The directory of a key. A name may go to another key, so the digest of the key itself decides."""
    return key.sha256.hex()[:32] or "any"


class Storage:
    """Owns a directory. `open` before anything else; `close` at the end."""

    def __init__(self, directory: Path, most_bytes: int, owners: Callable[[], int]) -> None:
        """`most_bytes`: of all files. `owners`: returns how many API keys share them equally."""
        self._directory = directory
        self._most_bytes = most_bytes
        self._owners = owners
        self._thread = ThreadPoolExecutor(1, "batches")
        self._known: dict[str, dict[str, Described]] = {}
        self._bytes: dict[str, int] = {}
        self._lock: int | None = None

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a method of this object, or what it is given, in the thread of the directory."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._lock is not None:
            os.close(self._lock)

    # ------------------------------------------------------------ in the thread

    def open(self) -> None:
        """Reads what is there. Raises ValueError for a directory that is unusable, or another router's."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--batch-dir {self._directory}: another router uses it") from None
        except OSError as error:
            raise ValueError(f"--batch-dir {self._directory}: {error.strerror}") from error
        for folder in filter(Path.is_dir, self._directory.iterdir()):
            descriptions: dict[str, Described] = {}
            for path in folder.glob("*.json"):
                if _ID.fullmatch(path.stem):
                    kind = FileObject if path.stem.startswith("file") else BatchObject
                    try:
                        descriptions[path.stem] = msgspec.json.decode(path.read_bytes(), type=kind)
                    except (msgspec.DecodeError, OSError) as error:
                        log.error("%s cannot be read, and is left out: %s", path, error)
            self._known[folder.name] = dict(sorted(descriptions.items(), key=lambda each: each[1].created_at))
            described = {path.stem for path in folder.glob("*.json")}
            for leftover in folder.iterdir():  # of uploads that were cut
                if leftover.name.partition(".")[0] not in described:
                    leftover.unlink()
            self._bytes[folder.name] = sum(path.stat().st_size for path in folder.glob("*.jsonl*"))

    def owners(self) -> list[str]:
        return list(self._known)

    def all_of(self, owner: str, kind: type[T]) -> list[T]:
        """All of one kind, the oldest first. Forgets what has expired."""
        now, descriptions = timestamp(), self._known.get(owner, {})
        for each in list(descriptions.values()):
            ends = each.expires_at if isinstance(each, FileObject) else each.created_at + MAX_SECONDS
            if ends < now and (isinstance(each, FileObject) or each.ended):
                self._forget(owner, each.id)
        return [each for each in descriptions.values() if isinstance(each, kind)]

    def get(self, owner: str, id: str, kind: type[T]) -> T:
        """Raises NotFound, also for what another owner has."""
        described = self._known.get(owner, {}).get(id)
        if not isinstance(described, kind) or (
            isinstance(described, FileObject) and described.expires_at < timestamp()
        ):
            raise NotFound(f"there is no {'file' if kind is FileObject else 'batch'} {id[:80]!r}")
        return described

    def put(self, owner: str, described: Described) -> None:
        """Keeps a description. Raises RateLimited for one too many."""
        descriptions = self._known.setdefault(owner, {})
        kind = type(described)
        if described.id not in descriptions and len(self.all_of(owner, kind)) >= MAX_FILES:
            raise RateLimited(
                f"this API key has {MAX_FILES} of these; delete some, or wait until they expire"
            )
        self._describe(owner, described)

    def _describe(self, owner: str, described: Described) -> None:
        path = self._path(owner, described.id, "json")
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(described))
        new.rename(path)
        self._known[owner][described.id] = described

    def delete(self, owner: str, id: str) -> None:
        """Forgets a file. Raises NotFound, and InvalidRequest while a batch reads it."""
        self.get(owner, id, FileObject)
        for batch in self.all_of(owner, BatchObject):
            if batch.input_file_id == id and not batch.ended:
                raise InvalidRequest(f"the batch {batch.id} reads this file; cancel it first")
        self._forget(owner, id)

    def _forget(self, owner: str, id: str) -> None:
        content = self._path(owner, id, "jsonl")
        if content.exists():
            self._bytes[owner] -= content.stat().st_size
            content.unlink()
        self._path(owner, id, "json").unlink(missing_ok=True)
        del self._known[owner][id]

    def append(self, owner: str, id: str, data: bytes, kind: str = "jsonl") -> None:
        """Appends to a content. Raises BodyTooLarge where the owner's share or the disk is full."""
        share = self._most_bytes // max(1, self._owners())
        used = self._bytes.get(owner, 0)
        if used + len(data) > share:
            raise BodyTooLarge(f"files of this API key have {used} bytes, of {share} (--batch-dir-size)")
        path = self._path(owner, id, kind)
        try:
            with path.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise BodyTooLarge(f"the router cannot keep more files: {error.strerror}") from error
        self._bytes[owner] = used + len(data)

    def drop(self, owner: str, id: str) -> None:
        """Removes the content of an upload that was cut."""
        path = self._path(owner, id, "jsonl")
        if path.exists():
            self._bytes[owner] -= path.stat().st_size
            path.unlink()

    def finish(self, owner: str, batch: BatchObject, status: str) -> None:
        """Makes files of the results of a batch, and ends it. Goes on where another call was killed."""
        counts, paths = batch.request_counts, {}
        for name, kind in (("output", "jsonl.out"), ("error", "jsonl.err")):
            path = self._path(owner, batch.id, kind)
            if path.exists():
                count = len(self.results(owner, batch.id, kind))
                setattr(counts, "completed" if name == "output" else "failed", count)
                id = getattr(batch, f"{name}_file_id") or new_id("file")
                setattr(batch, f"{name}_file_id", id)
                paths[id] = path, f"{batch.id}_{name}.jsonl"
        self.put(owner, batch)
        for id, (path, filename) in paths.items():
            size = path.stat().st_size
            path.rename(self._path(owner, id, "jsonl"))
            self._describe(owner, file_object(id, size, filename, "batch_output"))
        batch.now(status)
        self.put(owner, batch)

    def content(self, owner: str, id: str) -> Path:
        """The path of a file's content. Raises NotFound."""
        self.get(owner, id, FileObject)
        return self._path(owner, id, "jsonl")

    def results(self, owner: str, batch: str, kind: str) -> set[str | None]:
        """The `custom_id`s that have a result. Removes a last line that was cut."""
        path = self._path(owner, batch, kind)
        if not path.exists():
            return set()
        custom_ids: set[str | None] = set()
        with path.open("rb+") as file:
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    self._bytes[owner] -= len(line)
                    break
                end += len(line)
                custom_ids.add(msgspec.json.decode(line)["custom_id"])
            file.truncate(end)
        return custom_ids

    def _path(self, owner: str, id: str, kind: str) -> Path:
        assert _ID.fullmatch(id)
        folder = self._directory / owner
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / f"{id}.{kind}"
