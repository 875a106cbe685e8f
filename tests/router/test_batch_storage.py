"""What is on disk of files and batches: after a kill at any step, while the disk is full, and in time."""

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from baton.router.batches import disk, runner
from baton.router.batches.objects import (
    BatchObject,
    FileObject,
    file_object,
    new_id,
    result_id,
    timestamp,
)
from baton.router.batches.runner import Batches
from baton.router.batches.storage import LINE_BYTES, SLICE_BYTES, Storage
from baton.router.errors import BodyTooLarge, NotFound
from tests.within import WITHIN, within

from .fragile_disk import Disk, Killed

OWNER = "a" * 32
RESULTS = [msgspec.json.encode({"custom_id": f"r{n}"}) + b"\n" for n in range(3)]


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Disk]:
    def made(steps: float) -> Disk:
        monkeypatch.setattr(disk, "os", made := Disk(steps))
        return made

    return made


MOST_BYTES = 1 << 24


def opened(folder: Path) -> Storage:
    storage = Storage(folder, MOST_BYTES, lambda: 1)
    storage.open()
    return storage


def leave(storage: Storage) -> None:
    """What a kill does: the next router may lock the directory, and nothing is written any more."""
    storage._unsaved.clear()
    storage.close()


def batch_of(file: str, **fields: Any) -> BatchObject:
    now = timestamp()
    return BatchObject(
        id=new_id("batch"), endpoint="/", input_file_id=file, created_at=now, expires_at=now, **fields
    )


class Life:
    """Files and batches from the upload to the end. Notes what clients have been told."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.file, self.batch = new_id("file"), batch_of("")
        self.batch.input_file_id = self.file
        self.uploaded = self.created = self.deleted = self.asked_to_delete = False
        self.kept = 0
        """Results that are on disk."""
        self.ended: str | None = None

    def run(self, status: str) -> None:
        """`status`: with which the batch ends."""
        put = self.storage.put
        for piece in (b"12", b"345"):
            self.storage.append(OWNER, self.file, piece)
        put(OWNER, file_object(self.file, 5, "in", "batch", timestamp()))
        self.uploaded = True
        put(OWNER, self.batch)
        self.created = True
        self.batch.now("in_progress")
        put(OWNER, self.batch)
        output, error = result_id(self.batch.id, "output"), result_id(self.batch.id, "error")
        for file, result in zip((output, error, output), RESULTS, strict=True):
            self.storage.append(OWNER, file, result)
            self.kept += 1
        if status == "cancelled":
            self.batch.now("cancelling")
            put(OWNER, self.batch)
        self.storage.finish(OWNER, self.batch, status)
        self.ended = status
        self.asked_to_delete = True
        self.storage.delete(OWNER, self.file)
        assert self.batch.error_file_id is not None
        self.storage.delete(OWNER, self.batch.error_file_id)
        self.deleted = True


def states(fragile: Callable[[float], Disk], tmp_path: Path, status: str) -> Iterator[tuple[Path, Life]]:
    """The life that ends at its first, second, … operation, up to the one that does not end."""
    steps, killed = 0, True
    while killed:
        folder = tmp_path / f"killed at {steps}"
        fragile(float("inf"))
        life = Life(opened(folder))
        fragile(steps)
        try:
            life.run(status)
            killed = False
        except Killed:
            pass
        fragile(float("inf"))
        leave(life.storage)
        yield folder, life
        steps += 1


def results_of(storage: Storage, batch: str, kind: Literal["output", "error"]) -> set[str]:
    with pytest.raises(StopIteration) as end:
        next(storage.results(OWNER, batch, kind))
    return end.value.value


def check(storage: Storage, life: Life) -> None:
    """A router that starts again has all that clients were told, and nothing else."""
    files = {each.id: each for each in storage.all_of(OWNER, FileObject)}
    for file in files.values():
        assert storage.content(OWNER, file.id).stat().st_size == file.bytes
    if life.uploaded and not life.asked_to_delete:
        assert storage.content(OWNER, life.file).read_bytes() == b"12345"
    if life.deleted:
        assert files.keys() == {result_id(life.batch.id, "output")}
    batches = storage.all_of(OWNER, BatchObject)
    assert [each.id for each in batches] == [life.batch.id] * len(batches)
    assert len(batches) >= life.created
    for batch in batches:
        assert (
            batch.status == life.ended
            or (life.ended is None and batch.status != "completed")
            or (batch.ended and life.kept == len(RESULTS))
        )
        found = results_of(storage, batch.id, "output") | results_of(storage, batch.id, "error")
        expected = {"r0", "r1", "r2"} if not life.asked_to_delete else {"r0", "r2"}
        assert {f"r{n}" for n in range(life.kept)} & expected <= found
        if batch.ended:
            assert batch.output_file_id in files
            assert batch.error_file_id in files or life.asked_to_delete
        else:
            assert not files.keys() & {result_id(batch.id, "output"), result_id(batch.id, "error")}
    folder = storage._directory / OWNER
    if folder.exists():
        assert not list(folder.glob("*.new"))
        used = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
        with pytest.raises(BodyTooLarge, match=f"have {used} bytes, of {MOST_BYTES} "):
            storage.append(OWNER, life.file, bytes(MOST_BYTES + 1))


@pytest.mark.cases(1)
@pytest.mark.parametrize("status", ["completed", "cancelled", "expired"])
def test_a_router_that_is_killed_at_any_step_loses_nothing(
    tmp_path: Path, fragile: Callable[[float], Disk], status: str
) -> None:
    count = 0
    for folder, life in states(fragile, tmp_path, status):
        count, starts = count + 1, 0
        while True:  # the router that starts again is killed at each of its own steps, too
            again = Path(shutil.copytree(folder, f"{folder}, then at {starts}"))
            fragile(starts)
            starting = Storage(again, MOST_BYTES, lambda: 1)
            try:
                starting.open()
                break
            except Killed:
                fragile(float("inf"))
                leave(starting)
                storage = opened(again)
                check(storage, life)
                leave(storage)
            starts += 1
        fragile(float("inf"))
        check(starting, life)
        leave(starting)
    assert count > 50


async def test_what_a_full_disk_does_not_take_is_written_later(
    tmp_path: Path, fragile: Callable[[float], Disk]
) -> None:
    """Changes happen in memory first. What is new is refused, and nothing of it stays."""
    room = fragile(float("inf"))
    storage = opened(tmp_path)
    life = Life(storage)
    storage.append(OWNER, life.file, b"12345")
    storage.put(OWNER, file_object(life.file, 5, "in", "batch", timestamp()))
    storage.put(OWNER, life.batch)
    output, upload = result_id(life.batch.id, "output"), new_id("file")
    storage.append(OWNER, output, RESULTS[0])
    storage.append(OWNER, upload, b"12345")
    room.full = True
    with pytest.raises(BodyTooLarge, match="cannot keep more files: No space left"):
        storage.append(OWNER, output, RESULTS[2])
    assert (tmp_path / OWNER / f"{output}.jsonl").read_bytes() == RESULTS[0], "nothing of another one is left"
    for new in (file_object(upload, 5, "new", "batch", timestamp()), batch_of(life.file)):
        with pytest.raises(BodyTooLarge, match="cannot keep more files: No space left"):
            storage.put(OWNER, new)
    storage.finish(OWNER, life.batch, "failed")
    assert (life.batch.status, life.batch.output_file_id) == ("failed", output)
    assert storage.content(OWNER, output).read_bytes() == RESULTS[0]
    storage.delete(OWNER, life.file)
    room.full = False
    storage.tidy(OWNER)
    leave(storage)
    storage = opened(tmp_path)
    [batch] = storage.all_of(OWNER, BatchObject)
    assert batch == life.batch
    assert [file.id for file in storage.all_of(OWNER, FileObject)] == [output]
    leave(storage)


def test_a_file_expires_when_no_batch_reads_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(tmp_path)
    life = Life(storage)
    start, later = timestamp(), 0
    monkeypatch.setattr("baton.router.batches.storage.timestamp", lambda: start + later)
    storage.append(OWNER, life.file, b"12345")
    storage.put(OWNER, file_object(life.file, 5, "in", "batch", start, 3600))
    storage.put(OWNER, life.batch)
    storage.append(OWNER, result_id(life.batch.id, "output"), RESULTS[0])
    later = 3601
    storage.tidy(OWNER)
    assert storage.content(OWNER, life.file).read_bytes() == b"12345", "the batch goes on"
    life.batch.output_expires_after = {"anchor": "created_at", "seconds": 7200}
    storage.finish(OWNER, life.batch, "completed")
    with pytest.raises(NotFound):
        storage.get(OWNER, life.file, FileObject)
    storage.tidy(OWNER)
    [output] = storage.all_of(OWNER, FileObject)
    assert output.expires_at == output.created_at + 7200
    assert life.batch.completed_at == output.created_at
    later = 7300
    storage.tidy(OWNER)
    assert not list(tmp_path.rglob("*.jsonl"))
    leave(storage)


def test_files_of_others_in_the_directory_stay(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in (f"{OWNER}/notes", "any/notes.json", "src/a.jsonl", "b")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (cut := tmp_path / OWNER / f"{new_id('file')}.jsonl").write_text("x")
    leave(opened(tmp_path))
    assert all(path.exists() for path in paths)
    assert not cut.exists()


def slices_of(path: Path) -> int:
    count, slices = 0, runner.check(path, "/v1/completions", 8000)
    with contextlib.suppress(runner.InvalidFile):
        for count, _ in enumerate(slices, 1):  # noqa: B007 - the last one counts
            pass
    return count


async def test_other_calls_run_between_the_slices_of_a_check(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"\n" * (1 << 20))
    assert slices_of(path) == runner.MAX_LINES * LINE_BYTES // SLICE_BYTES, "blank lines count"
    path.write_bytes(b"x" * (5 << 20))
    assert slices_of(path) >= 4, "one long line is read in slices, too"
    storage = opened(tmp_path / "kept")
    checking = asyncio.ensure_future(storage.in_slices(OWNER, runner.check(path, "/v1/completions", 8000)))
    for _ in range(5):
        await storage.call(OWNER, storage.all_of, OWNER, FileObject)
    assert not checking.done()
    with pytest.raises(runner.InvalidFile):
        await checking
    leave(storage)


async def test_a_call_waits_for_one_call_of_each_other_owner(tmp_path: Path) -> None:
    storage, order, go = Storage(tmp_path, 1 << 30, lambda: 1), list[str](), threading.Event()

    def noted(owner: str) -> None:
        assert go.wait(WITHIN)
        order.append(owner)

    async with asyncio.TaskGroup() as group:
        for owner in "a" * 50 + "b" + "a" * 5 + "c":
            group.create_task(storage.call(owner, noted, owner))
        await asyncio.sleep(0)
        go.set()
    assert sorted(order[1:3]) == ["b", "c"]
    assert len(order) == 57
    await asyncio.to_thread(storage.close)


def test_results_are_read_in_slices_up_to_what_is_damaged(tmp_path: Path) -> None:
    storage, batch = opened(tmp_path), new_id("batch")
    whole = b"".join(msgspec.json.encode({"custom_id": f"r{n}"}) + b"\n" for n in range(3000))
    for damage in (b'{"custom_id": "x"}', bytes(600) + b"\n" + RESULTS[0], b"\xff\n"):
        storage.append(OWNER, result_id(batch, "output"), whole + damage)
        reading = storage.results(OWNER, batch, "output")
        for _ in range(3000 * LINE_BYTES // SLICE_BYTES):
            next(reading)
        with pytest.raises(StopIteration) as end:
            next(reading)
        assert end.value.value == {f"r{n}" for n in range(3000)}
        assert (tmp_path / OWNER / f"{result_id(batch, 'output')}.jsonl").read_bytes() == whole
        storage.forget(OWNER, result_id(batch, "output"))
    leave(storage)


async def test_a_check_ends_with_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, slices, check = asyncio.Event(), 0, runner.check
    loop = asyncio.get_running_loop()

    def counting(*arguments: Any) -> Any:
        nonlocal slices
        for _ in check(*arguments):
            slices += 1
            loop.call_soon_threadsafe(begun.set)
            yield

    monkeypatch.setattr(runner, "check", counting)
    storage = Storage(tmp_path, 1 << 30, lambda: 1)
    batches = Batches(storage, no_send, 8000)
    await batches.open()
    life = Life(storage)
    storage.append(OWNER, life.file, b"\n" * (20 << 20))
    storage.put(OWNER, file_object(life.file, 20 << 20, "in", "batch", timestamp()))
    life.batch.expires_at += 3600
    await batches.create(OWNER, life.batch)
    await begun.wait()
    await batches.close()
    storage.close()
    assert slices < runner.MAX_LINES * LINE_BYTES / SLICE_BYTES
    assert life.batch.status == "validating"


async def test_a_batch_runs_although_its_client_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept, so a batch that does not run could never end."""
    storage = Storage(tmp_path, 1 << 30, lambda: 1)
    batches = Batches(storage, no_send, 8000)
    await batches.open()
    go, ended = threading.Event(), asyncio.Event()
    loop, finish = asyncio.get_running_loop(), Storage.finish

    def finished(*arguments: Any) -> None:
        finish(*arguments)
        loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(Storage, "finish", finished)
    waiting = asyncio.ensure_future(storage.call(OWNER, go.wait))
    batch = batch_of(new_id("file"))
    creating = asyncio.ensure_future(batches.create(OWNER, batch))
    await asyncio.sleep(0)  # it waits for the thread
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    go.set()
    await waiting
    await within(ended.wait())
    assert batch.ended
    await batches.close()
    storage.close()


async def test_a_batch_that_ends_is_not_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path, 1 << 30, lambda: 1)
    batches = Batches(storage, no_send, 8000)
    await batches.open()
    go, ending, ended = threading.Event(), asyncio.Event(), asyncio.Event()
    loop, finish = asyncio.get_running_loop(), Storage.finish

    def slow_finish(*arguments: Any) -> None:
        loop.call_soon_threadsafe(ending.set)
        assert go.wait(WITHIN)
        finish(*arguments)
        loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(Storage, "finish", slow_finish)
    batch = batch_of(new_id("file"))  # which is not there, so the batch fails
    batch.expires_at += 3600
    await batches.create(OWNER, batch)
    await within(ending.wait())
    cancelling = asyncio.ensure_future(batches.cancel(OWNER, batch))
    await asyncio.sleep(0)
    go.set()
    await cancelling
    await within(ended.wait())
    assert (batch.status, batch.cancelling_at) == ("failed", None)
    await batches.close()
    storage.close()


async def test_requests_that_are_long_are_sent_with_few_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_SENT_BYTES", 10_000)
    at_a_time: list[int] = []
    sent = 0

    async def send(owner: str, path: str, body: bytes, name: str) -> bytes:
        nonlocal sent
        sent += 1
        at_a_time.append(sent)
        await storage.call("", storage.owners)  # others are sent meanwhile
        sent -= 1
        return b"{}"

    storage = Storage(tmp_path, 1 << 30, lambda: 1)
    batches = Batches(storage, send, 8000)
    await batches.open()
    for size, most in ((10, 32), (4000, 2), (7900, 1)):
        body = {"prompt": "x" * (size - 10)}
        lines = [
            {"method": "POST", "url": "/v1/completions", "custom_id": f"r{n}", "body": body}
            for n in range(50)
        ]
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        life = Life(storage)
        storage.append(OWNER, life.file, data)
        storage.put(OWNER, file_object(life.file, len(data), "in", "batch", timestamp()))
        life.batch.endpoint, life.batch.expires_at = "/v1/completions", timestamp() + 3600
        at_a_time.clear()
        await batches.create(OWNER, life.batch)
        while not life.batch.ended:
            await storage.call("", storage.owners)
        assert life.batch.request_counts.completed == 50, life.batch.errors
        assert max(at_a_time) <= most
    await batches.close()
    storage.close()


async def no_send(owner: str, path: str, body: bytes, name: str) -> bytes:
    raise AssertionError("no request is sent")
