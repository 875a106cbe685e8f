"""Which workers `baton serve` starts on the GPUs of a machine."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from baton.cluster import check_model, serve
from baton.cluster import gpus as machine
from baton.cluster.cli import app
from baton.cluster.gpu_pools import CHOOSE, Gpu, Needs, Ranks, choose_pools
from baton.cluster.gpus import gpus_with_memory
from baton.cluster.supervision import blueprint
from baton.cluster.supervision.blueprint import Blueprint, RoleSpec
from baton.cluster.tools.sizing import MODELS
from baton.cluster.tools.sizing.speeds import H200 as H200_GPU
from baton.cluster.tools.sizing.speeds import as_kept
from baton.cluster.tools.sizing.worker_needs import TooLarge, computed
from baton.engine.api.config import EngineConfig
from baton.engine.execution.cache_limits import CacheLimits, kept_format, weight_bytes
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hf_config import model_config_from_hf
from baton.engine.loader.int_formats import stored_groups

H200, H100 = 139.0, 79.6
OPTIONS: dict[str, object] = {
    "quantization": "auto", "dtype": "auto", "kv_cache_dtype": "auto", "max_model_len": None,
}  # fmt: skip
SHAPES = {  # of what differs from Llama-3.1-8B
    "70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "235B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "max_position_embeddings": 40960,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The names or the directories of models, which have no weights."""
    found = {"8B": "llama-3.1-8b"}
    base = {"235B": MODELS["qwen3-30b-a3b"]}
    for name, change in SHAPES.items():
        directory = tmp_path_factory.mktemp(name)
        config = base.get(name, MODELS["llama-3.1-8b"]) | change
        (directory / "config.json").write_text(json.dumps(config))
        found[name] = str(directory)
    return found


@pytest.mark.parametrize(
    ("model", "gib", "gpus", "ranks", "pools"),
    [
        ("8B", H200, 1, 1, (0, 1)),
        ("8B", H200, 2, 1, (1, 1)),
        ("8B", H200, 3, 1, (1, 2)),
        ("8B", H200, 4, 1, (2, 2)),
        ("8B", H100, 4, 1, (2, 2)),
        ("8B", H200, 8, 1, (4, 4)),
        ("70B", H200, 1, None, None),
        ("70B", H200, 2, 2, (0, 1)),
        ("70B", H200, 3, 2, (0, 1)),
        ("70B", H200, 4, 2, (1, 1)),
        ("70B", H100, 4, 4, (0, 1)),
        ("70B", H200, 8, 2, (2, 2)),
        ("235B", H200, 2, None, None),
        ("235B", H200, 4, 4, (0, 1)),
        ("235B", H200, 8, 4, (1, 1)),
        ("235B", H100, 8, 8, (0, 1)),
    ],
)
def test_all_gpus_are_used(
    model: str,
    gib: float,
    gpus: int,
    ranks: int | None,
    pools: tuple[int, int] | None,
    models: dict[str, str],
) -> None:
    def needed() -> Needs:
        return computed(models[model], OPTIONS, (None, None), gpus, gib, (0.9, 256, 0.0))

    if ranks is None:
        with pytest.raises(TooLarge, match=f"{gpus} GPUs? of {gib:.0f} GiB cannot hold it"):
            needed()
        return
    needs = needed()
    chosen = choose_pools([Gpu(str(number), gib, 0.5) for number in range(gpus)], needs, 0.9)
    assert (needs.ranks, (chosen.prefill, chosen.decode)) == ((ranks, ranks), pools)
    assert f"--prefill {chosen.prefill} --decode {chosen.decode}, {ranks} GPU" in chosen.text
    assert chosen.text.endswith("Choose otherwise with " + CHOOSE + ".")


def test_int8_weights_are_planned_as_the_engine_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed only where they would else leave no room for one request. A worker has the fewest GPUs that hold
    it then."""
    monkeypatch.setattr("baton.engine.layers.grouped_linear.from_hopper_on", lambda device: True)
    model = model_config_from_hf(MODELS["llama-3.1-8b"] | SHAPES["70B"], {}, "70B")
    bf16, cuda, found = torch.bfloat16, torch.device("cuda"), set[bool]()
    int8 = stored_groups("t", 8, 128, "m", lambda *_: pytest.fail("reads no weights"), cuda)
    for gib, ranks, context in product((60, 80, 100, 139, 200), (1, 2, 4, 8), (2048, 131072)):
        config = EngineConfig("m", tensor_parallel_size=ranks)
        limits = CacheLimits(bf16, 128, context, cache_spec(model.of_rank(ranks), bf16))
        kept = kept_format(config, model, int8, limits, gib << 30)
        gpu = replace(H200_GPU, memory=gib << 30)
        share = config.gpu_memory_utilization
        worker = as_kept(gpu, model, int8, bf16, ranks, bf16, 2000, share, context)
        assert worker.weight_bytes == weight_bytes(model, kept, bf16), (gib, ranks, context)
        found.add(kept is int8)
        if not worker.holds(context, share):
            assert kept is int8
    assert found == {True, False}


@pytest.mark.parametrize(
    ("gpus", "ranks", "pools", "names", "said"),
    [
        ([0.5, 14.0, 0.5, 0.5], (1, 1), (1, 2), "0 2 3", "GPU 1 is skipped: 14 of its 139 GiB are in use."),
        ([13.8, 0.5], (1, 1), (1, 1), "0 1", "GPUs 0, 1: --prefill 1 --decode 1, 1 GPU a worker."),
        ([0.5] * 3, (2, 2), (0, 1), "0 1 2", "--prefill 0 --decode 1, 2 GPUs a worker. Each does both."),
        ([0.5] * 3, (2, 2), (0, 1), "0 1 2", "GPU 2: left over."),
        ([0.5] * 6, (2, 1), (2, 2), "0 1 2 3 4 5", "1 GPU a decode worker, 2 GPUs a prefill worker."),
    ],
)  # fmt: skip
def test_gpus_in_use_are_skipped_and_named(
    gpus: list[float], ranks: tuple[int, int], pools: tuple[int, int], names: str, said: str
) -> None:
    found = [Gpu(str(number), H200, used) for number, used in enumerate(gpus)]
    chosen = choose_pools(found, Needs(Ranks(*ranks)), 0.9)
    assert ((chosen.prefill, chosen.decode), chosen.gpus) == (pools, tuple(names.split()))
    assert said in chosen.text


@pytest.mark.parametrize(
    ("seats", "longest_step", "pools"),
    [(256, 0.0, (4, 4)), (256, 30.0, (4, 4)), (256, 11.0, (3, 5)), (8, 0.0, (3, 5))],
)
def test_fewer_requests_of_a_decode_worker_are_more_decode_workers(
    seats: int, longest_step: float, pools: tuple[int, int]
) -> None:
    """`longest_step`: `--itl-target`."""
    needs = computed("llama-3.1-8b", OPTIONS, (None, None), 8, H200, (0.9, seats, longest_step))
    chosen = choose_pools([Gpu(str(number)) for number in range(8)], needs, 0.9)
    assert (chosen.prefill, chosen.decode) == pools


def test_a_pool_that_is_much_slower_is_larger() -> None:
    gpus = [Gpu(str(number)) for number in range(8)]
    for prefill_rate, decode_rate, pools in (
        (10, 1, (2, 6)),
        (3, 1, (3, 5)),
        (1, 1, (4, 4)),
        (1, 10, (6, 2)),
    ):
        chosen = choose_pools(gpus, Needs(Ranks(), prefill_rate, decode_rate), 0.9)
        assert (chosen.prefill, chosen.decode) == pools


def test_no_gpu_is_free() -> None:
    with pytest.raises(ValueError, match=r"needs 1 GPU, and 0 of 1 are free\. GPU 7 is skipped: 99 of its"):
        choose_pools([Gpu("7", H200, 99)], Needs(), 0.9)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [Gpu("0", 140, 1), Gpu("1", 140, 70)]),
        ("1", [Gpu("1", 140, 70)]),
        ("GPU-bb, GPU-aa", [Gpu("GPU-bb", 140, 70), Gpu("GPU-aa", 140, 1)]),
        ("MIG-aa", [Gpu("MIG-aa")]),
        ("", []),
    ],
)
def test_the_memory_of_the_gpus_that_are_visible(
    visible: str | None, expected: list[Gpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["0, GPU-aa11, 143360, 1024", "1, GPU-bb22, 143360, 71680", "2, GPU-cc33, [N/A], [N/A]"]
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path)
    monkeypatch.setattr(machine, "nvidia_smi", lambda *_: lines)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_with_memory() == expected


HOST = (
    "Up to 12 GiB of this host's memory are for cached KV that leaves the GPUs. Choose otherwise with "
    "--host-cache-size, for one worker; 0 turns it off."
)


@pytest.mark.parametrize(
    ("flags", "sizes", "names", "said"),
    [
        ((), [1, 2], ["0", "1", "2"], 1),
        (("--decode-tensor-parallel-size", "2"), [1, 1], ["0", "1", "2"], 1),
        (("--prefill", "1"), [1, 1], ["0", "1", "2"], 0),  # as told
        (("--decode", "2", "--prefill", "0"), [0, 2], ["0", "1", "2"], 0),
        (("--device", "cpu"), [1, 1], ["0", "1", "2"], 0),
    ],
)
def test_serve_chooses_only_what_it_is_not_told(
    flags: tuple[str, ...], sizes: list[int], names: list[str], said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Blueprint, list[RoleSpec], list[str], tuple[str, ...]]] = []

    class Cluster:
        def __init__(self, *given: Any) -> None:
            started.append(given)

        async def run(self) -> int:
            return 0

    monkeypatch.setattr(serve, "LocalCluster", Cluster)
    monkeypatch.setattr(check_model, "faults", lambda *_: [])
    monkeypatch.setattr(serve, "gpus_with_memory", lambda: [Gpu(name) for name in names])
    monkeypatch.setattr(blueprint, "visible_gpus", lambda: names)
    monkeypatch.setattr(blueprint, "available_memory", lambda: 48 << 30)
    given = flags if "--device" in flags else ("--device", "cuda", *flags)
    result = CliRunner().invoke(app, ["serve", "--port", "0", *given])
    assert result.exit_code == 0, result.output
    [(_, roles, gpus, lines)] = started
    assert [sum(role.role == pool for role in roles) for pool in ("prefill", "decode")] == sizes
    assert gpus == names
    assert [line.split(":")[0] for line in lines] == ["GPUs 0, 1, 2"] * said + [HOST] * ("cpu" not in flags)
    assert sum(role.gpus for role in roles) == (0 if "cpu" in flags else 3 if said else sum(sizes))
    shares = [int(role.args[role.args.index("--host-cache-size") + 1]) for role in roles if role.gpus]
    assert sum(shares) == (0 if "cpu" in flags else 12 << 30)
