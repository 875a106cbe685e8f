"""Files of a checkpoint that another worker sends: what is right arrives, and what lies leaves nothing."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from baton.engine import trainer_files
from baton.rpc import worker_pb2 as pb
from baton.worker.service_process import checkpoint_files
from baton.worker.service_process.backend import Refused
from baton.worker.service_process.checkpoint_files import CheckpointFiles

FILES = {
    "config.json": b"{}",
    250 * "n" + ".json": b"a long name",
    "model.safetensors": bytes(range(256)) * 10,
    "none.json": b"",
}


def begin(name: str, size: int) -> pb.CheckpointPart:
    return pb.CheckpointPart(name=name, size=size)


def more(data: bytes) -> pb.CheckpointPart:
    return pb.CheckpointPart(data=data)


async def each(parts: Sequence[pb.CheckpointPart]) -> AsyncIterator[pb.CheckpointPart]:
    for part in parts:
        yield part


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def sent(files: CheckpointFiles) -> list[pb.CheckpointPart]:
    parts = list[pb.CheckpointPart]()

    async def write(part: pb.CheckpointPart) -> None:
        parts.append(part)

    await files.send(write)
    return parts


async def test_files_stay_readable_when_their_names_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "PART", 1000)
    source, before = tmp_path / "source", descriptors()
    source.mkdir()
    for name, content in FILES.items():
        (source / name).write_bytes(content)
    (source / "optimizer.pt").write_bytes(b"large")
    (source / "consolidated.safetensors").write_bytes(b"the same once more")
    opened = CheckpointFiles.opened(source, str(tmp_path))
    for name in FILES:
        (source / name).unlink()
    received = await CheckpointFiles.received(each(await sent(opened)), str(tmp_path))
    for files in (opened, received):
        assert {file.name: file.read_bytes() for file in Path(files.path).iterdir()} == FILES
        files.close()
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == [source]


async def test_memory_of_a_trainers_gpu_is_not_read_once_more(tmp_path: Path) -> None:
    source, before = tmp_path / "source", descriptors()
    source.mkdir()
    (source / "config.json").write_bytes(b"{}")
    (source / f"model-00001-of-00001{trainer_files.SUFFIX}").write_bytes(b"{}")
    opened = CheckpointFiles.opened(source, str(tmp_path))
    assert opened.path == str(source), "the trainer leaves its copy there"
    with pytest.raises(Refused, match=r"from a trainer's GPUs: they are at .*source"):
        await sent(opened)
    opened.close()
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == [source]


async def test_the_first_of_several_files_brings_the_others(tmp_path: Path) -> None:
    names = [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for name in names:
        (tmp_path / name).write_text(name)
    files = CheckpointFiles.opened(tmp_path / names[0], None)
    copy = await CheckpointFiles.received(each(await sent(files)), None)
    for opened in (files, copy):
        first = Path(opened.path)
        assert [first.with_name(name).read_text() for name in names] == names
        assert first.name == names[0]
        opened.close()


async def test_one_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    opened = CheckpointFiles.opened(tmp_path / "model.gguf", None)
    received = await CheckpointFiles.received(each(await sent(opened)), None)
    for files in (opened, received):
        assert Path(files.path).name == "model.gguf"
        assert Path(files.path).read_bytes() == b"GGUF"
        files.close()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "ended in the middle of a file"),
        ([begin("a.json", 3), more(b"ab")], "ended in the middle of a file"),
        ([begin("a.json", 3), more(b"abcd")], "bytes of no file"),
        ([begin("a.json", 3), more(b"")], "bytes of no file"),
        ([more(b"a")], "bytes of no file"),
        ([begin("a.json", 3), begin("b.json", 3)], "began a file in the middle of another"),
        ([begin("a.json", 0), begin("a.json", 0)], "a file 'a.json', which no checkpoint has"),
        ([begin("../a.json", 0)], "a file '../a.json', which"),
        ([begin(".json", 0)], "a file '.json', which"),
        ([begin("a\n.json", 0)], "which no checkpoint has"),
        ([begin("a.pt", 0)], "a file 'a.pt', which"),
        ([begin("a.cuda.json", 0)], "a file 'a.cuda.json', which"),
        ([begin(251 * "a" + ".json", 0)], "which no checkpoint has"),
        ([begin("a.json", 1 << 60)], "MiB of memory more than the host has"),
        ([begin(f"{i}.json", 0) for i in range(5)], "a file '4.json', which"),
    ],
)
async def test_a_worker_that_lies_is_refused_and_nothing_stays(
    parts: Sequence[pb.CheckpointPart], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, close = list[threading.Thread](), CheckpointFiles.close

    def noted(files: CheckpointFiles) -> None:
        closing.append(threading.current_thread())
        close(files)

    monkeypatch.setattr(CheckpointFiles, "close", noted)
    monkeypatch.setattr(checkpoint_files, "MOST_FILES", 4)
    before = descriptors()
    with pytest.raises(Refused, match=reason):
        await CheckpointFiles.received(each(parts), str(tmp_path))
    assert descriptors() == before
    assert not list(tmp_path.iterdir())
    [thread] = closing
    assert thread is not threading.current_thread(), "to give much memory back takes a second"


async def test_a_copy_that_is_cancelled_writes_to_no_file_that_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, goes_on, wrote, write = threading.Event(), threading.Event(), threading.Event(), os.write

    def slow(fd: int, data: bytes) -> int:
        writes.set()
        goes_on.wait()
        count = write(fd, data)
        wrote.set()
        return count

    monkeypatch.setattr(os, "write", slow)
    copying = asyncio.create_task(CheckpointFiles.received(each([begin("a.json", 3), more(b"abc")]), None))
    await asyncio.to_thread(writes.wait)
    copying.cancel()
    for _ in range(10):  # turns of the loop in which the cancellation would close the files
        await asyncio.sleep(0)
    later = tmp_path / "later"
    with later.open("wb", buffering=0):
        goes_on.set()
        await asyncio.to_thread(wrote.wait)
        with pytest.raises(asyncio.CancelledError):
            await copying
    assert later.read_bytes() == b""


async def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(3 * checkpoint_files.PART))
    opened = CheckpointFiles.opened(file, None)

    async def write(part: pb.CheckpointPart) -> None:
        os.truncate(file, checkpoint_files.PART)

    with pytest.raises(Refused, match=r"model\.gguf has become shorter"):
        await opened.send(write)
    opened.close()
