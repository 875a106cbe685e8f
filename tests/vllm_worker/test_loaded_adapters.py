"""The files of adapters, and which of them vLLM has. Without vLLM itself."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.vllm_worker.adapters import FILES, MAX_CONFIG_BYTES, Adapters, fingerprint_of


def saved(directory: Path, content: str) -> str:
    directory.mkdir()
    for file in FILES:
        (directory / file).write_text(content)
    return str(directory)


class VLLM:
    """`numbers`: what it has loaded. It fails for paths in `broken`, and calls `meanwhile` as it reads."""

    def __init__(self, most: int = 2) -> None:
        self.numbers = dict[int, str]()
        self.broken = set[str]()
        self.meanwhile: Callable[[], object] = lambda: None
        self.adapters = Adapters(self.add, self.remove, most)

    async def add(self, fingerprint: bytes, number: int, path: str) -> None:
        if path in self.broken:
            raise ValueError("rank 64 is above 16")
        self.numbers[number] = path
        self.meanwhile()

    async def remove(self, number: int) -> None:
        del self.numbers[number]


async def at_once() -> None:
    pass


def test_a_fingerprint_is_of_the_name_and_the_files(tmp_path: Path) -> None:
    """Of the same files on another host it is the same."""
    first, other = saved(tmp_path / "first", "a"), saved(tmp_path / "other", "b")
    again = shutil.copytree(first, tmp_path / "again")
    assert fingerprint_of("sql", first) == fingerprint_of("sql", str(again))
    assert len({fingerprint_of(name, path) for name in ("sql", "chat") for path in (first, other)}) == 4
    (tmp_path / "other" / FILES[1]).unlink()
    (tmp_path / "other" / "adapter_model.bin").write_text("a pickle")
    with pytest.raises(ValueError, match=f"there is no file .*{FILES[1]}; save the adapter with PEFT"):
        fingerprint_of("sql", other)
    (tmp_path / "first" / FILES[0]).write_bytes(bytes(MAX_CONFIG_BYTES + 1))
    with pytest.raises(ValueError, match="has more than"):
        fingerprint_of("sql", first)


async def test_what_is_on_the_device_is_told_by_fingerprint(tmp_path: Path) -> None:
    vllm = VLLM(3)
    first, second = [await vllm.adapters.load(name, saved(tmp_path / name, name)) for name in ("a", "b")]
    assert (vllm.adapters.on_device, vllm.adapters.move_seconds) == ([], 0.0)
    vllm.adapters.moved([2], 0.5)
    assert (vllm.adapters.on_device, vllm.adapters.move_seconds) == ([second], 0.5)
    vllm.adapters.moved([1, 2, 7], 0.1)  # vLLM warms up with adapters of its own
    assert (vllm.adapters.on_device, vllm.adapters.move_seconds) == ([first, second], pytest.approx(0.3))
    await vllm.adapters.unload(second, at_once)
    assert vllm.adapters.on_device == [first]


async def test_an_adapter_stays_while_requests_use_it(tmp_path: Path) -> None:
    """It counts until then. One that is loaded again meanwhile stays."""
    one, two, vllm = saved(tmp_path / "one", "1"), saved(tmp_path / "two", "2"), VLLM(most=1)
    loaded = await vllm.adapters.load("one", one)
    unused = asyncio.Event()

    async def wait() -> None:
        await unused.wait()

    unloading = asyncio.create_task(vllm.adapters.unload(loaded, wait))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="requests still use an adapter that was unloaded"):
        await vllm.adapters.load("two", two)
    assert await vllm.adapters.load("one", one) == loaded
    unused.set()
    await unloading
    assert vllm.numbers == {1: one}
    await vllm.adapters.unload(loaded, at_once)
    assert vllm.numbers == {}
    await vllm.adapters.load("two", two)
    assert vllm.numbers == {2: two}, "a number of its own: vLLM knows adapters by theirs"


async def test_what_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    one, vllm = saved(tmp_path / "one", "1"), VLLM()
    vllm.broken = {one}
    with pytest.raises(ValueError, match="rank 64"):
        await vllm.adapters.load("one", one)
    vllm.broken.clear()
    vllm.meanwhile = lambda: (tmp_path / "one" / FILES[1]).write_text("2")
    with pytest.raises(ValueError, match="changed while they were read"):
        await vllm.adapters.load("one", one)
    assert vllm.numbers == {}
    vllm.meanwhile = lambda: None
    assert vllm.adapters.of(await vllm.adapters.load("one", one)).path == one
