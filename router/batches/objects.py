"""Files and batches as clients see them, and as their descriptions on disk are."""

import hashlib
import os
import time
from typing import Any, Literal

import msgspec

from baton.router.admission.keys import ApiKey

MAX_SECONDS = 30 * 24 * 3600
"""A file or an ended batch is kept so long."""


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
    output_expires_after: dict[str, Any] | None = None
    """Has `seconds`, from the end of the batch on."""

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    def now(self, status: str) -> None:
        """Changes the status, with the time of the change. A client that sees the status sees the time."""
        setattr(self, f"{status}_at", timestamp())
        self.status = status


def file_object(
    id: str,
    size: int,
    filename: str,
    purpose: Literal["batch", "batch_output"],
    created_at: int,
    seconds: int = MAX_SECONDS,
) -> FileObject:
    """A file that expires `seconds` after it was made."""
    return FileObject(
        id=id,
        bytes=size,
        created_at=created_at,
        expires_at=created_at + seconds,
        filename=filename,
        purpose=purpose,
    )


def timestamp() -> int:
    return int(time.time())  # noqa: TID251 - clients see it, and it outlives the process


def new_id(kind: Literal["file", "batch"]) -> str:
    return f"{kind}-{os.urandom(16).hex()}"


def result_id(batch: str, kind: Literal["output", "error"]) -> str:
    """The id of a file of results."""
    return f"file-{hashlib.sha256(f'{batch} {kind}'.encode()).hexdigest()[:32]}"


def owner_of(key: ApiKey) -> str:
    """The directory of a key. A name may go to another key, so the digest of the key itself decides."""
    return key.sha256.hex()[:32] or "any"
