"""Memory that an engine gives back for a while: the system has it meanwhile, and answers stay right."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import Engine
from baton.engine.execution.kept_cache import KeptCache
from baton.engine.execution.shared_weights import SharedWeights
from baton.engine.layers.ranks import Ranks
from baton.system.device_memory import DeviceMemory, HostMemory, Page
from tests.device import DEVICE
from tests.engine.checkpoints import load
from tests.engine.conftest import request_of, run
from tests.engine.random_checkpoints import save_random
from tests.engine.test_live_weights import trained

PROMPT = [3, 5, 7, 11] * 145
SETTINGS: dict[str, Any] = {"device": DEVICE, "enable_prefix_caching": True, "num_blocks": None}
if DEVICE == "cuda":
    SETTINGS["num_blocks"] = 200  # two engines are on it at a time


def taken() -> int:
    """Bytes that memory of pages takes."""
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssShmem")]
    return int(line.split()[1]) << 10


def answer(engine: Engine, number: int) -> tuple[Any, int]:
    """Of a prompt, and how many of its tokens were cached."""
    [result] = run(engine, [request_of(number, PROMPT, max_tokens=8, ignore_eos=True, logprobs=3)]).values()
    engine.assert_whole()
    outputs = result.outputs
    return (result.tokens, [output.logprobs for output in outputs]), outputs[0].cached_tokens or 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "changes", "settings"),
    [
        ("Llama", {}, {"dtype": "bfloat16"}),
        ("Qwen3", {}, {"quantization": "int4"}),
        *(
            pytest.param(kind, changes, {}, marks=pytest.mark.long)
            for kind, changes in (
                ("DeepseekV3", {}),
                ("Qwen3Moe", {}),
                ("Bamba", {}),
                ("Qwen3_5Text", {}),
                ("GptOss", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
            )
        ),
    ],
)
def test_an_engine_computes_as_before_once_memory_and_weights_are_back(
    kind: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path, one_form: None
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, kind, max_position_embeddings=1024, **changes)
    after = trained(before, tmp_path)
    fresh = load(after, **SETTINGS | settings)
    wanted, _ = answer(fresh, 1)
    wanted_cached, _ = answer(fresh, 2)
    gc.collect()  # or shared memory of other tests goes meanwhile
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # a start does so, too
    outside = taken()
    engine = load(before, enable_memory_saver=True, **SETTINGS | settings)
    first, _ = answer(engine, 1)
    _, cached = answer(engine, 2)
    assert cached >= 512
    used = taken()
    assert used > outside

    engine.loop.frozen = True
    engine.memory.release(["kv_cache"])
    without_kv = taken()
    engine.memory.release(["kv_cache", "weights"])
    assert engine.memory.released == {"kv_cache", "weights"}
    assert used > without_kv > taken() >= outside
    if DEVICE == "cpu":  # a GPU keeps what steps compute in, and the memory of graphs
        assert taken() == outside
    with pytest.raises(ValueError, match="the memory of the weights is released: call /resume_memory"):
        engine.stage_weights(str(after))
    engine.memory.resume(["weights"])
    assert not engine.memory.is_whole
    engine.replace_weights(engine.stage_weights(str(after)), "1")
    assert not engine.memory.is_whole
    engine.memory.resume(["weights", "kv_cache"])
    assert engine.memory.is_whole
    engine.loop.frozen = False
    assert answer(engine, 3) == (wanted, 0), "nothing is left in the cache"
    assert answer(engine, 4) == (wanted_cached, cached)
    engine.loop.frozen = True
    engine.memory.release(["kv_cache"])
    engine.memory.resume(["kv_cache"])
    engine.loop.frozen = False
    assert answer(engine, 5) == (wanted, 0), "weights stay where only the cache was released"
    assert first != wanted


class Short(HostMemory):
    """Of a device that another process fills."""

    def create(self, count: int) -> list[Page]:
        if self.full:
            raise MemoryError("no page is left")
        return super().create(count)

    full = False


@pytest.mark.cases(1)
@pytest.mark.parametrize("of", ["saver", "elastic"])
def test_what_cannot_be_had_again_stays_released_until_it_can(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_form: None
) -> None:
    opened: list[Short] = []

    def short(device: int | None, page_bytes: int, **_: Any) -> DeviceMemory:
        opened.append(Short(page_bytes))
        return opened[-1]

    monkeypatch.setattr("baton.engine.execution.elastic_cache.open_device_memory", short)
    monkeypatch.setattr(Short, "full", False)
    kind = "Llama" if of == "saver" else "Qwen3_5Text"
    save_random(tmp_path, kind, max_position_embeddings=1024)
    engine = load(tmp_path, enable_memory_saver=True, **SETTINGS | {"device": "cpu"})
    wanted, _ = answer(engine, 1)
    engine.loop.frozen = True
    engine.memory.release(["kv_cache"])
    monkeypatch.setattr(Short, "full", True)
    with pytest.raises(MemoryError, match="no page is left"):
        engine.memory.resume(["kv_cache"])
    assert engine.memory.released == {"kv_cache"}
    monkeypatch.setattr(Short, "full", False)
    engine.memory.resume(["kv_cache"])
    engine.loop.frozen = False
    assert answer(engine, 2) == (wanted, 0)
    assert len(opened) > 1


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks are threads here")
def test_each_rank_gives_its_memory_back_and_all_have_it_again_or_wait(
    tmp_path: Path, ranks: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, "Llama", max_position_embeddings=1024)
    after = trained(before, tmp_path)
    settings: dict[str, Any] = {"enable_prefix_caching": True, "num_blocks": 64, "block_size": 16}
    wanted = answer(load(after, dtype="float32", **settings), 1)[0][0]
    engine = ranks(before, 2, enable_memory_saver=True, **settings)
    first, used = answer(engine, 1)[0][0], taken()
    engine.loop.frozen = True
    released = list[object]()
    for part in (KeptCache, SharedWeights):
        release = part.release
        monkeypatch.setattr(part, "release", lambda x, release=release: released.append(x) or release(x))
    engine.memory.release(["kv_cache", "weights"])
    assert len({id(part) for part in released}) == 4, "two parts on two ranks"
    assert taken() < used
    resume, ranks_that_lack = SharedWeights.resume, [1]

    def full(weights: SharedWeights) -> None:
        if threading.current_thread() is not threading.main_thread() and ranks_that_lack:
            ranks_that_lack.pop()
            raise MemoryError("no page is left")
        resume(weights)

    monkeypatch.setattr(SharedWeights, "resume", full)
    with pytest.raises(MemoryError, match="rank 1: no page is left"):
        engine.memory.resume(["weights"])
    assert engine.memory.released == {"kv_cache", "weights"}
    engine.memory.resume(["weights", "kv_cache"])
    engine.replace_weights(engine.stage_weights(str(after)), "1")
    assert engine.memory.is_whole
    engine.loop.frozen = False
    assert answer(engine, 2)[0][0] == wanted != first


def test_tensors_that_share_memory_share_it_in_pages() -> None:
    weights = SharedWeights(None, torch.device("cpu"), Ranks(), alone=True)
    whole = torch.arange(3000.0)
    part, other = whole[1000:].view(2, 1000).T, torch.ones(3, dtype=torch.int8)
    weights.finish([whole, part, other])
    assert torch.equal(whole, torch.arange(3000.0))
    assert part[0].tolist() == [1000.0, 2000.0]
    with weights.writing():
        part[0, 1] = 7.0
    assert whole[2000] == 7.0
    assert other.tolist() == [1, 1, 1]
    address = whole.data_ptr()
    weights.release()
    weights.resume()
    assert whole.data_ptr() == address
    assert not whole.any(), "what was there is gone"


def test_memory_is_released_only_if_the_engine_was_started_for_it(tmp_path: Path) -> None:
    save_random(tmp_path, "Llama")
    with pytest.raises(ValueError, match="start the workers with --enable-memory-saver"):
        load(tmp_path).memory.check()
