"""Engine processes of one worker that have one copy of the weights."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import Engine
from baton.engine.api.request import Hooks
from baton.engine.execution import kept_cache, load_weights, shared_weights
from baton.engine.execution.cache_limits import CUDA_BYTES, GIB
from baton.engine.execution.kept_cache import Keep, Measured, measured
from baton.engine.execution.memory_sizing import MemoryUse
from baton.engine.execution.shared_weights import SharedWeights
from baton.engine.execution.start import Started, start_rank
from baton.engine.kernels.scratch import Scratch
from baton.engine.layers.in_place import tensors
from baton.engine.layers.ranks import Ranks
from baton.system.kept_pages import KeptMemory, close
from tests.device import DEVICE
from tests.engine.checkpoints import edit_json

from .conftest import MakeEngine, TinyOf, request_of, run, save_tiny
from .test_images import pixels_of, request_with
from .test_live_weights import trained

SETTINGS: dict[str, Any] = {"stands_by": True}
"""Without a prefix cache no KV is kept: engines of one test compute beside each other."""


@pytest.fixture(autouse=True)
def leaves_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an engine stands by if the one before has left what it measured, and does so with its KV."""

    def start_and_leave(*args: Any) -> Started:
        started, keep = start_rank(*args), args[-1]
        if keep.memory:
            leave(keep.memory[0], Measured(started.pool, started.steps))
        return started

    monkeypatch.setattr("baton.engine.engine.start_rank", start_and_leave)


def leave(memory: KeptMemory, found: Measured) -> None:
    """As `KeptCache.remember`, without KV."""
    text = kept_cache._JSON.dump_json(found)
    os.ftruncate(memory.table, kept_cache._HEAD)
    os.pwrite(memory.table, len(text).to_bytes(4, "little") + text, kept_cache._KEY_BYTES)
    assert measured(Keep([memory])) == found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[SharedWeights]:
    """Those of the engines that the test makes, in order."""
    made: list[SharedWeights] = []

    def make(*args: Any, **options: Any) -> SharedWeights:
        made.append(SharedWeights(*args, **options))
        return made[-1]

    monkeypatch.setattr(load_weights, "SharedWeights", make)
    return made


def nothing() -> None:
    """The turn of a standby comes at once."""


def answer(engine: Engine) -> list[int]:
    asked = request_of(1, range(3, 43), max_tokens=8, ignore_eos=True)
    return run(engine, [asked])[asked.id].tokens


def address_of(weight: torch.Tensor) -> int:
    return torch.ops.mkldnn.data_ptr(weight) if weight.is_mkldnn else weight.data_ptr()


def has(shared: SharedWeights, weight: torch.Tensor) -> bool:
    return 0 <= address_of(weight) - shared._address < shared.nbytes


def access(shared: SharedWeights) -> set[str]:
    """How this process has mapped the pages on a CPU."""
    found = set[str]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, may, *_ = line.split()
        if 0 <= int(where.partition("-")[0], 16) - shared._address < shared.nbytes:
            found.add(may)
    return found


FORMS = [
    ("Llama", {}, {}),
    ("Qwen3Moe", {}, {"dtype": "bfloat16"}),
    ("Bamba", {}, {}),
    ("Gemma4Text", {}, {"dtype": "bfloat16"}),
    ("DeepseekV3", {}, {}),
    ("GptOss", {}, {}),
    ("Qwen3", {}, {"quantization": "int4"}),
    # On a GPU products in FP8 need sizes that are multiples of 16.
    ("Qwen3Moe", {"moe_intermediate_size": 32}, {"quantization": "fp8", "dtype": "bfloat16"}),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "changes", "form"), FORMS)
def test_the_next_engine_has_the_memory_of_the_one_before(
    tiny_engine: MakeEngine,
    memory: KeptMemory,
    shared: list[SharedWeights],
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    form: dict[str, Any],
) -> None:
    save_tiny(tmp_path, kind, **changes)
    settings = SETTINGS | {"model": str(tmp_path)} | form
    right = answer(tiny_engine(**settings))
    first = tiny_engine(kept_files=[memory], **settings)
    assert answer(first) == right

    def turn() -> None:
        assert answer(first) == right, "steps write to no weight"
        if DEVICE == "cpu":
            assert access(shared[1]) == {"r--s"}

    second = tiny_engine(kept_files=[memory], wait_for_turn=turn, **settings)
    assert answer(second) == right
    if DEVICE == "cpu":
        assert access(shared[0]) == access(shared[1]) == {"r--s"}
    for each, engine in zip(shared, (first, second), strict=True):
        assert not each.apart_bytes
        assert all(has(each, weight) for weight in tensors(engine.loaded.model, without=Ranks()))
    assert shared[0].nbytes == shared[1].nbytes
    pages = [each._bytes_at(each._address + 512, each.nbytes - 512) for each in shared]
    with shared[0].writing():
        pages[0].fill_(7)
    assert pages[1].unique().tolist() == [7]


def test_what_kernels_write_to_is_no_weight() -> None:
    """Two processes would count the parts of one tile."""
    weight, counts = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    assert [*tensors([weight, Scratch(counts)])] == [weight]


def test_no_memory_is_taken_twice(
    tiny_engine: MakeEngine, memory: KeptMemory, shared: list[SharedWeights]
) -> None:
    """Not by views of one tensor, nor beside the weights."""
    engine = tiny_engine(kept_files=[memory], **SETTINGS)
    weights = [*tensors(engine.loaded.model)]
    size = sum(-(-(x.numel() * x.element_size()) // 512) * 512 for x in weights)
    [kept] = memory.weights.pages()
    close(kept)
    assert shared[0].nbytes <= size + 64 * kept.page_bytes


def test_other_weights_are_not_taken_for_those_that_serve(
    tiny_engine: MakeEngine, memory: KeptMemory, shared: list[SharedWeights]
) -> None:
    settings = SETTINGS | {"load_format": "dummy"}
    right = [answer(tiny_engine(seed=seed, **settings)) for seed in (0, 1)]
    assert right[0] != right[1]
    first = tiny_engine(kept_files=[memory], seed=0, **settings)
    standby = tiny_engine(kept_files=[memory], wait_for_turn=nothing, seed=1, **settings)
    assert shared[1].apart_bytes
    assert [answer(first), answer(standby)] == right


@pytest.mark.all
def test_an_engine_that_is_alone_makes_its_pages(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory, shared: list[SharedWeights]
) -> None:
    """As after a standby that could not take over. It lets go of the pages of the one before."""
    for settings in (
        SETTINGS,
        SETTINGS | {"load_format": "dummy", "seed": 1},
        SETTINGS | {"model": str(tiny_of("Qwen3Moe"))},
    ):
        right = answer(tiny_engine(**settings))
        shared.clear()
        assert answer(tiny_engine(kept_files=[memory], **settings)) == right
        assert answer(tiny_engine(kept_files=[memory], wait_for_turn=nothing, **settings)) == right
        assert [each.apart_bytes for each in shared] == [0, 0]
        assert shared[0].nbytes == shared[1].nbytes
        [kept] = memory.weights.pages()
        close(kept)
        assert len(kept.pages) * kept.page_bytes == shared[0].nbytes


KINDS = (torch.Tensor, torch.nn.Parameter)
"""Other kinds, such as fake tensors that tests before have left, have no memory."""


def own_bytes(shared: list[SharedWeights]) -> int:
    """Of all that tensors have on a CPU beside the pages. On a GPU all that is taken there.

    A CPU's figure counts no memory that the allocator keeps: that depends on the tests before."""
    gc.collect()
    if DEVICE != "cpu":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    apart = [x for x in gc.get_objects() if type(x) in KINDS and not any(has(each, x) for each in shared)]
    return sum(piece.size for piece in shared_weights._pieces(apart, torch.device("cpu")))


LARGE = 512 if DEVICE == "cpu" else 2048
"""On an H200 an encoder took 110 MiB beside its weights. Those of this size have 400."""
LARGER_TOWER = {"depth": 4, "hidden_size": LARGE, "intermediate_size": 4 * LARGE, "num_heads": LARGE // 64}


@pytest.mark.all
@pytest.mark.parametrize("kind", ["Llama", "Qwen3VL"])
def test_a_standby_takes_less_than_the_weights(
    tiny_engine: MakeEngine,
    tiny_of: TinyOf,
    memory: KeptMemory,
    shared: list[SharedWeights],
    tmp_path: Path,
    kind: str,
) -> None:
    """Most of them are those of the language model, or those of the encoder of images."""
    for file in tiny_of(kind).glob("*.json"):
        shutil.copy(file, tmp_path)
    path = tmp_path / "config.json"
    larger = {"hidden_size": LARGE, "intermediate_size": 4 * LARGE, "num_hidden_layers": 4}
    if kind == "Qwen3VL":
        larger = {"vision_config": json.loads(path.read_text())["vision_config"] | LARGER_TOWER}
    edit_json(path, **larger)
    settings = SETTINGS | {"model": str(tmp_path), "dtype": "bfloat16", "load_format": "dummy"}
    first = tiny_engine(kept_files=[memory], **settings)
    answer(first)
    before = own_bytes(shared)
    standby = tiny_engine(kept_files=[memory], wait_for_turn=nothing, **settings)
    assert answer(standby) == answer(first)
    taken = own_bytes(shared) - before
    print(f"weights {shared[0].nbytes >> 20} MiB, the standby {taken / (1 << 20):.1f} MiB")
    assert taken < shared[0].nbytes / 2


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "load_format"), [("Qwen3VL", "auto"), ("Qwen3VL", "dummy"), ("Gemma4", "auto")]
)
def test_the_encoder_of_images_has_the_memory_of_the_one_before(
    tiny_engine: MakeEngine,
    tiny_of: TinyOf,
    memory: KeptMemory,
    shared: list[SharedWeights],
    tmp_path: Path,
    kind: str,
    load_format: str,
) -> None:
    settings = SETTINGS | {"model": str(tiny_of(kind)), "load_format": load_format}
    fresh = tiny_engine(**settings)
    asked = request_with(1, fresh, [pixels_of(1, 40, 24)])

    def seen(engine: Engine) -> list[int]:
        return run(engine, [asked])[asked.id].tokens

    right = seen(fresh)
    first = tiny_engine(kept_files=[memory], **settings)
    second = tiny_engine(kept_files=[memory], wait_for_turn=nothing, **settings)
    for each, engine in zip(shared, (first, second), strict=True):
        assert seen(engine) == right
        assert not each.apart_bytes
        assert engine.encoder is not None
        tower = engine.encoder._encode.__self__._model  # pyrefly: ignore[missing-attribute]
        assert all(has(each, weight) for weight in tower.parameters())
        assert all(has(each, weight) for weight in engine.loaded.tower.values())
    if load_format == "auto":
        path = trained(tiny_of(kind), tmp_path)
        new = seen(tiny_engine(**settings | {"model": str(path)}))
        second.replace_weights(second.stage_weights(str(path)), "1")
        assert seen(second) == new != right


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_weights_are_those_of_the_next_standby(
    tiny_engine: MakeEngine,
    tiny_path: Path,
    memory: KeptMemory,
    shared: list[SharedWeights],
    tmp_path: Path,
    dtype: str,
) -> None:
    settings, path = SETTINGS | {"dtype": dtype}, trained(tiny_path, tmp_path)
    new = answer(tiny_engine(model=str(path), **settings))
    first = tiny_engine(kept_files=[memory], **settings)
    assert answer(first) != new
    first.replace_weights(first.stage_weights(str(path)), "1")
    assert answer(first) == new
    settings |= {"model": str(path), "weights_version": "1"}
    standby = tiny_engine(kept_files=[memory], wait_for_turn=nothing, **settings)
    assert answer(standby) == new
    assert not shared[1].apart_bytes
    standby.replace_weights(standby.stage_weights(str(tiny_path)), "2")
    assert answer(standby) == answer(first) != new, "it writes to the pages, too"


def test_a_standby_does_not_take_over_weights_that_are_half_written(
    tiny_engine: MakeEngine, memory: KeptMemory, shared: list[SharedWeights]
) -> None:
    """The engine that serves ends in the change, before or after the standby maps the pages."""
    first = tiny_engine(kept_files=[memory], **SETTINGS)

    def ends_in_the_change() -> None:
        shared[0].writing().__enter__()

    for turn in (ends_in_the_change, nothing):
        with pytest.raises(ValueError, match="were changed while"):
            tiny_engine(kept_files=[memory], wait_for_turn=turn, **SETTINGS)
    assert answer(tiny_engine(kept_files=[memory], **SETTINGS)) == answer(first)


@pytest.mark.all
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU compares sums")
def test_nothing_writes_to_shared_weights_outside_of_a_change() -> None:
    """A process that does ends, so a standby may take over without a look at the bytes."""
    ended = subprocess.run([sys.executable, "-c", STRAY], stdout=subprocess.PIPE, check=False)
    assert ended.stdout == b"in a change\n"
    assert ended.returncode == -signal.SIGSEGV


STRAY = """
import torch
from baton.engine.execution.shared_weights import SharedWeights
from baton.engine.layers.ranks import Ranks
weight = torch.zeros(1000)
shared = SharedWeights(None, torch.device("cpu"), Ranks(), alone=True)
shared.finish([weight])
with shared.writing():
    weight[7] = 1
print("in a change", flush=True)
weight[7] = 2
print("later")
"""


@pytest.mark.parametrize("loads", ["old", "new"])
def test_a_standby_does_not_take_over_weights_that_were_changed(
    tiny_engine: MakeEngine, tiny_path: Path, memory: KeptMemory, tmp_path: Path, loads: str
) -> None:
    """The engine that served ended before it could tell, or while the standby compared."""
    first, path = tiny_engine(kept_files=[memory], **SETTINGS), trained(tiny_path, tmp_path)
    staged = [first.stage_weights(str(path))]

    def change() -> None:
        if staged:
            first.replace_weights(staged.pop(), "1")

    def progress(stage: str, fraction: float) -> None:
        if loads == "new" and stage == "loading weights":
            change()

    model = path if loads == "new" else tiny_path
    with pytest.raises(ValueError, match="were changed while"):
        tiny_engine(
            kept_files=[memory],
            wait_for_turn=change,
            hooks=Hooks(progress=progress),
            model=str(model),
            **SETTINGS,
        )
    assert not staged


def test_a_standby_that_cannot_share_its_weights_ends(
    memory: KeptMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "MOST_APART", 4096)
    device = torch.device(DEVICE)

    def shared(alone: bool) -> SharedWeights:
        return SharedWeights(memory.weights, device, Ranks(), alone=alone)

    shared(True).finish([torch.zeros(3000, device=device)])
    standby = shared(False)
    standby.part_built("layers.0", torch.ones(1000, device=device))
    with pytest.raises(ValueError, match="both cannot share them"):
        standby.part_built("layers.1", torch.ones(1000, device=device))


def test_the_weights_count_once_in_the_memory_of_a_gpu() -> None:
    use = MemoryUse(
        total=100 * GIB, free=80 * GIB, weights=16 * GIB, activations=GIB, graphs=GIB, stands_by=True
    )
    assert use.standby == CUDA_BYTES + 18 * GIB
    shares = replace(use, shared=15 * GIB, loading=2 * GIB)
    assert shares.standby == CUDA_BYTES + 3 * GIB
    assert replace(shares, loading=4 * GIB).standby == CUDA_BYTES + 4 * GIB
    assert shares.room(0.9) > use.room(0.9) + 14 * GIB
