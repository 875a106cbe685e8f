"""Engine processes of one worker that have one copy of the weights."""

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import Engine
from baton.engine.execution.shared_weights import share
from baton.engine.layers.in_place import tensors
from baton.worker.kept_files import KeptFiles

from .conftest import MakeEngine, TinyOf, request_of, run
from .test_live_weights import trained

SETTINGS: dict[str, Any] = {"device": "cpu", "stands_by": True}
"""Without KV that is kept: engines of one test compute beside each other."""


@pytest.fixture
def memory() -> Iterator[KeptFiles]:
    files = KeptFiles.create()
    yield files
    files.close()


def shared_bytes(fd: int) -> int:
    """Of the file's pages: how many this process has mapped and not written to."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.split()[4] == str(os.fstat(fd).st_ino) and "baton-weights" in line
        elif counts and line.startswith(("Rss:", "Anonymous:")):
            total += (1 if line.startswith("Rss:") else -1) * int(line.split()[1]) * 1024
    return total


def answer(engine: Engine) -> list[int]:
    asked = request_of(1, range(3, 43), max_tokens=8, ignore_eos=True)
    return run(engine, [asked])[asked.id].tokens


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Bamba", "Gemma4Text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_engine_has_the_memory_of_the_one_before(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptFiles, kind: str, dtype: str
) -> None:
    settings = SETTINGS | {"model": str(tiny_of(kind)), "dtype": dtype}
    right = answer(tiny_engine(**settings))
    first = tiny_engine(kept_files=[memory], **settings)
    assert answer(first) == right
    size = os.fstat(memory.weights).st_size
    model = first._loaded.model
    assert size >= sum(x.nbytes for x in tensors(model) if not x.is_mkldnn)
    with pytest.raises(PermissionError):
        os.pwrite(memory.weights, b"1", 0)
    before = shared_bytes(memory.weights)
    second = tiny_engine(kept_files=[memory], wait_for_turn=lambda: None, **settings)
    assert answer(second) == right
    assert shared_bytes(memory.weights) - before >= size - mmap.PAGESIZE


def test_a_file_of_other_weights_is_not_used(tiny_engine: MakeEngine, memory: KeptFiles) -> None:
    settings = SETTINGS | {"load_format": "dummy"}
    right = [answer(tiny_engine(seed=seed, **settings)) for seed in (0, 1)]
    assert right[0] != right[1]
    engines = [tiny_engine(kept_files=[memory], seed=seed, **settings) for seed in (0, 1)]
    assert [answer(engine) for engine in engines] == right


def test_new_weights_do_not_change_the_file(
    tiny_engine: MakeEngine, tiny_path: Path, memory: KeptFiles, tmp_path: Path
) -> None:
    """A process that stands by has the same pages until another one takes its place."""
    first = tiny_engine(kept_files=[memory], **SETTINGS)
    standby = tiny_engine(kept_files=[memory], wait_for_turn=lambda: None, **SETTINGS)
    old, path = answer(standby), trained(tiny_path, tmp_path)
    new = answer(tiny_engine(model=str(path), **SETTINGS))
    assert new != old
    assert answer(first) == old
    first.replace_weights(first.stage_weights(str(path)), "1")
    assert answer(first) == new
    assert answer(standby) == old


def test_a_file_that_is_half_written_is_written_anew(memory: KeptFiles) -> None:
    os.pwrite(memory.weights, b"of a process that ended", 0)
    one, two = (torch.arange(3000.0) for _ in range(2))
    view = one[7:]
    assert share([one, view], memory.weights)
    assert share([two], memory.weights)
    assert view.tolist() == [*range(7, 3000)]
    one[9] = -1  # this process has the page for itself from now on
    assert view[2] == -1
    assert two[9] == 9
    assert not share([torch.arange(3000.0) + 1], memory.weights)
    assert not share([torch.arange(3001.0)], memory.weights)
