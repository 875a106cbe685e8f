"""An engine with tiers below the device gives the same tokens, even if a disk fails."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from baton.engine import Engine
from baton.engine.api.config import EngineConfig
from baton.engine.api.request import EngineRequest
from baton.engine.api.sampling_params import SamplingParams
from baton.engine.core.offload_tier import OffloadTier
from baton.kv_names import Tier
from baton.kv_transfer.stores import CellStore, HostStore
from baton.kv_transfer.stores.disk_store import DiskStore
from baton.worker.engine_process import offload
from baton.worker.engine_process.offload import offload_pumps
from tests.engine.conftest import MakeEngine
from tests.engine.test_offload import text

pytestmark = pytest.mark.all


def answers(
    engine: Engine,
    prompts: list[list[int]],
    directory: Path | None = None,
    break_store: Callable[[CellStore], None] = lambda store: None,
) -> list[list[int]]:
    """The tokens of each prompt. Copies are made as in the loop of a worker, beside the steps. Those of the
    first half of the prompts end before the next step, so that a slow disk has what later ones look for.
    `break_store` is called with the store of each tier before each prompt."""
    pumps = offload_pumps(engine, EngineConfig("tiny", disk_cache_dir=str(directory)))
    tokens: dict[bytes, list[int]] = {}
    for number, prompt in enumerate(prompts):
        request_id = number.to_bytes(2)
        tokens[request_id] = []
        for pump in pumps:
            break_store(pump._store)
        engine.add(EngineRequest(request_id, prompt, sampling=SamplingParams(max_tokens=20, ignore_eos=True)))
        to_the_end = number % 3 == 2 or number == len(prompts) - 1
        while not engine.idle if to_the_end else engine.stats().requests_waiting:
            if engine.loop.has_work:
                for output in engine.loop.step().outputs:
                    tokens[output.id].append(output.token)
            for pump in pumps:
                pump.pump()
                while pump.copies and number < len(prompts) // 2:
                    pump.pump()
    for pump in pumps:
        while pump.copies:
            pump.pump()
        pump.close()
    engine.assert_whole()
    return list(tokens.values())


TURNS = [[*text(20 + 7 * turn, chat), chat] for turn in range(3) for chat in range(6)]
"""For a pool that is too small, so that requests are preempted and prefixes evicted."""


def corrupt(store: CellStore) -> None:
    """Overwrites every second place of a disk, and changes a bit of every second place in memory."""
    if isinstance(store, DiskStore):
        size = store._size
        for place in range(0, os.fstat(store._file.fileno()).st_size // size, 2):
            os.pwrite(store._file.fileno(), bytes(size), place * size)
        return
    host = cast(HostStore, store)
    for place in range(0, len(host.sums), 2):
        if host.sums[place] is not None:
            memory = host.memory(place)
            memory[place % len(memory)] ^= 1 << place % 8


def fill_up(store: CellStore) -> None:
    assert isinstance(store, DiskStore)
    store._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115


@pytest.fixture(scope="module")
def without_tiers(tiny_engine: MakeEngine) -> list[list[int]]:
    return answers(tiny_engine(num_blocks=200), TURNS)


@pytest.fixture
def right(without_tiers: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of `TURNS`. Copies to tiers always pay meanwhile."""
    monkeypatch.setattr(OffloadTier, "pays", lambda *_: True)
    return without_tiers


def small(tiny_engine: MakeEngine, directory: Path, **given: object) -> Engine:
    """An engine with tiers."""
    return tiny_engine(
        num_blocks=30, enable_prefix_caching=True, max_num_seqs=4, disk_cache_dir=str(directory), **given
    )


@pytest.mark.parametrize(
    ("sizes", "overlap"),
    [
        pytest.param({Tier.HOST: 1 << 20}, True, id="host"),
        pytest.param({Tier.HOST: 1 << 15, Tier.DISK: 1 << 20}, False, id="both"),
    ],
)
def test_tokens_are_the_same_with_and_without_tiers(
    tiny_engine: MakeEngine,
    right: list[list[int]],
    tmp_path: Path,
    sizes: dict[Tier, int],
    overlap: bool,
) -> None:
    given = {f"{tier.name.lower()}_cache_size": size for tier, size in sizes.items()}
    engine = small(tiny_engine, tmp_path, overlap=overlap, **given)
    assert answers(engine, TURNS, tmp_path) == right
    stats = engine.stats()
    assert stats.preemptions
    assert [tier.tier for tier in stats.offload] == [*sizes]
    assert stats.offload[-1].loaded_tokens > 100
    for tier in stats.offload:
        assert tier.blocks_used <= tier.blocks_total == sizes[tier.tier] // engine.block_bytes
        assert tier.damaged == tier.failed == 0


def test_tiers_that_change_blocks_cost_no_token(
    tiny_engine: MakeEngine, right: list[list[int]], tmp_path: Path
) -> None:
    engine = small(tiny_engine, tmp_path, host_cache_size=1 << 17, disk_cache_size=1 << 20)
    assert answers(engine, TURNS, tmp_path, corrupt) == right
    for tier in engine.stats().offload:
        assert tier.damaged
        assert tier.loaded_tokens, "other blocks are whole"


def test_a_host_without_memory_has_no_tier(
    tiny_engine: MakeEngine,
    right: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def open_host_store(*_: object) -> HostStore:
        raise MemoryError("none is left")

    monkeypatch.setattr(offload, "open_host_store", open_host_store)
    engine = small(tiny_engine, tmp_path, host_cache_size=1 << 20)
    assert answers(engine, TURNS, tmp_path) == right
    size = (1 << 20) // engine.block_bytes * engine.block_bytes
    said = f"--host-cache-size: no host tier, {size} bytes cannot be had: none is left"
    assert [line for line in caplog.messages if "cache-size" in line] == [said]
    [stats] = engine.stats().offload
    assert stats.saved == stats.blocks_total == 0


def test_a_full_disk_costs_no_token(tiny_engine: MakeEngine, right: list[list[int]], tmp_path: Path) -> None:
    engine = small(tiny_engine, tmp_path, disk_cache_size=1 << 20)
    assert answers(engine, TURNS, tmp_path, fill_up) == right
    [stats] = engine.stats().offload
    assert stats.failed
    assert stats.saved == stats.blocks_used == 0
