"""`baton plan`: the pools that a load needs."""

import json
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from baton.bench.lab.shapes import BAMBA, SHAPES, SPARSE, write_shape
from baton.cluster.cli import app
from baton.cluster.options.clients import SizingOptions
from baton.cluster.supervision.blueprint import Blueprint
from baton.cluster.tools.sizing import ENCODE_TOKEN_SECONDS, MODELS, STEP_MODEL
from baton.cluster.tools.sizing.answer import Answer, Pools, Search, Targets, answer, predicted
from baton.cluster.tools.sizing.command import HUB_NAMES, serve_line
from baton.cluster.tools.sizing.speeds import H200, REFERENCE, SHAPE, Speeds, measured, opened
from baton.cluster.tools.sizing.worker_needs import TooLarge, computed
from baton.engine.api.config import EngineConfig
from baton.engine.execution.cache_limits import STEP_BYTES, weight_bytes
from baton.engine.loader import planned_format
from baton.engine.loader.hf_config import model_config_from_hf
from tests.engine.quantized import save_quantized

SPEEDS = Speeds(H200, REFERENCE)
STEPS = SPEEDS.steps
LOAD = SizingOptions(rate=20, input_len=2000, output_len=150)
TARGETS = Targets(ttft=0.5, itl=0.0065)


def answered(of_prefill: Speeds = SPEEDS, of_decode: Speeds = SPEEDS, **changes: Any) -> Answer:
    """For the load and the targets above, with changes to either."""
    targets = {name: value for name, value in changes.items() if name in ("ttft", "itl")}
    load = replace(LOAD, **{name: value for name, value in changes.items() if name not in targets})
    return answer(of_prefill, of_decode, load, TARGETS._replace(**targets))


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of simulated requests changes the accuracy of an answer, not the way to it."""
    monkeypatch.setattr("baton.cluster.tools.sizing.simulated.REQUESTS", 100)
    monkeypatch.setattr("baton.cluster.tools.sizing.simulated.PER_WORKER", 4)


def test_speeds_are_the_measured_ones() -> None:
    for tokens, seconds in H200.prefill.items():  # a step has 8,192 tokens at most
        assert SPEEDS.prefill(tokens) == pytest.approx(seconds, rel=0.002 if tokens <= 8192 else 0.05)
    for batch, seconds in H200.decode.items():
        assert STEPS.decode(batch, batch * 1064) == pytest.approx(seconds, rel=0.001)
    assert STEPS.prefill(1) > 4e-3, "all weights are read"
    assert STEPS.prefill(500, 1500) < STEPS.prefill(2000)


def test_a_simulated_prompt_takes_as_long_as_the_measured_one() -> None:
    """Both are padded to the rows of a graph, once."""
    machine = SPEEDS.machine(2075, 0.9, 256)
    for tokens in (2000, 8000):
        assert machine.step(0, 0, [(tokens, 0)]) == pytest.approx(H200.prefill[tokens], rel=0.003)


def test_prompts_do_not_take_longer_where_the_attention_of_decodes_does() -> None:
    slow = replace(H200, decode=H200.decode | {256: 1.1 * H200.decode[256]})
    assert Speeds(slow, REFERENCE).steps.prompt(256) == STEPS.prompt(256)
    slow = replace(H200, decode=H200.decode | {32: 1.1 * H200.decode[32]})
    assert Speeds(slow, REFERENCE).steps.prompt(32) > STEPS.prompt(32), "most of that step are products"


def test_a_model_of_twice_the_layers_takes_nearly_twice_as_long() -> None:
    double = Speeds(H200, replace(REFERENCE, num_layers=64))
    steps = double.steps
    assert 1.85 < steps.prefill(2000) / STEPS.prefill(2000) < 2.0, "the output projection is there once"
    assert 1.85 < steps.decode(64, 64_000) / STEPS.decode(64, 64_000) < 2.0
    assert double.kv_bytes_per_token == 2 * SPEEDS.kv_bytes_per_token == 2 * 131_072
    assert double.machine(2075, 0.9, 256).layers == 64


def test_a_mixture_of_experts_reads_only_the_experts_that_its_tokens_choose() -> None:
    model = opened("qwen3-30b-a3b").config
    assert model.num_parameters == pytest.approx(30.5e9, rel=0.01)
    assert model.parameters_read(1) == pytest.approx(3.35e9, rel=0.01), "the active parameters"
    assert model.parameters_read(1000) == pytest.approx(model.num_parameters)
    mixture = Speeds(H200, model)
    assert mixture.weight_bytes == 2 * model.num_parameters
    steps = mixture.steps
    assert steps.decode(1, 0) < 0.5 * STEPS.decode(1, 0)
    assert steps.decode(64, 0) > 2 * STEPS.decode(64, 0), "64 requests read nearly all experts"
    assert steps.decode(8, 0) - steps.decode(4, 0) > 10 * (steps.decode(256, 0) - steps.decode(252, 0))
    assert steps.prefill(8000) < STEPS.prefill(8000), "a long prompt is bound by products"


def test_a_llama4_has_the_published_numbers_of_parameters() -> None:
    scout, maverick = opened("llama-4-scout").config, opened("llama-4-maverick").config
    assert scout.num_parameters == pytest.approx(107.8e9, rel=0.001), "109 billion with those for images"
    assert maverick.num_parameters == pytest.approx(400.7e9, rel=0.001)
    for model in (scout, maverick):
        assert model.parameters_read(1) == pytest.approx(17.2e9, rel=0.002), "the active parameters"
    with pytest.raises(ValueError, match=r"the weights \(216 GB\) leave no room for KV"):
        Speeds(H200, scout).kv_room(0.9)


def test_a_latent_is_held_by_each_rank() -> None:
    flash, v3 = opened("glm-4.7-flash").config, opened("deepseek-v3").config
    assert v3.num_parameters == pytest.approx(671e9, rel=0.001)
    assert v3.parameters_read(1) == pytest.approx(38.0e9, rel=0.05), "the active parameters"
    assert flash.num_parameters == pytest.approx(29.9e9, rel=0.01)
    speeds = [Speeds(H200, flash, ranks=ranks) for ranks in (1, 4)]
    assert [x.kv_bytes_per_token for x in speeds] == [47 * 1152, 4 * 47 * 1152]
    mixture = Speeds(H200, opened("qwen3-30b-a3b").config)
    assert speeds[0].kv_bytes_per_token == pytest.approx(0.55 * mixture.kv_bytes_per_token, rel=0.01)


def test_an_index_bounds_the_latents_that_a_layer_reads() -> None:
    model = model_config_from_hf(SHAPES[SPARSE], {}, SPARSE)
    for positions, part in ((1000, 1.0), (128_000, 2048 / 128_000)):
        found = Speeds(H200, model, positions=positions)
        read = found.steps.context_seconds / (found.kv_bytes_per_token / H200.kv_bytes_per_s)
        assert read == pytest.approx(part)


def test_windows_bound_the_kv_that_a_layer_reads() -> None:
    model = opened("gpt-oss-20b").config
    assert model.num_parameters == pytest.approx(20.9e9, rel=0.01)
    assert opened("gpt-oss-120b").config.num_parameters == pytest.approx(116.8e9, rel=0.01)
    for positions, part in ((100, 1.0), (128_000, 0.5)):
        speeds, plain = (
            Speeds(H200, each, positions=positions) for each in (model, replace(model, spans=()))
        )
        assert speeds.kv_bytes_per_token == plain.kv_bytes_per_token
        assert speeds.kv_bytes(100) <= plain.kv_bytes(100), "no more than without windows"
        assert speeds.kv_bytes(8000) == pytest.approx(0.5625 * plain.kv_bytes(8000))
        read = [x.steps.decode(8, 8 * positions) - x.steps.decode(8, 0) for x in (speeds, plain)]
        assert read[0] == pytest.approx(part * read[1], rel=0.01)
        assert speeds.steps.prefill(30_000) < plain.steps.prefill(30_000)
        assert speeds.steps.pair_seconds == pytest.approx(part * plain.steps.pair_seconds, rel=0.01)


def test_kv_in_fp8_is_read_in_half_the_time() -> None:
    plain, fp8 = Speeds(H200, REFERENCE), Speeds(H200, REFERENCE, kv_dtype=torch.float8_e4m3fn)
    assert fp8.kv_bytes_per_token == plain.kv_bytes_per_token * (128 + 4) / (2 * 128)
    reading = [x.steps.decode(256, 256 * 1064) - x.steps.decode(256, 0) for x in (plain, fp8)]
    assert reading[1] == pytest.approx(reading[0] * (128 + 4) / (2 * 128))


@pytest.mark.all
def test_the_pools_are_the_smallest_that_meet_the_targets() -> None:
    found = answered()
    served = found.served
    assert served.ttft.p99 <= TARGETS.ttft
    assert served.gap.p99 <= TARGETS.itl
    for pool, workers in enumerate(found.pools):
        fewer = found.pools._replace(**{Pools._fields[pool]: workers - 1})
        if workers == 1:
            assert found.why[pool] == "one worker is enough"
            continue
        less = predicted(SPEEDS, SPEEDS, replace(LOAD, slo="ttft=500,itl=6.5"), fewer).served
        assert less.ttft.p99 > TARGETS.ttft or less.gap.p99 > TARGETS.itl
        assert "decides" in found.why[pool]
    assert 0 < found.kv_bytes < found.kv_room


@pytest.mark.all
@pytest.mark.parametrize(
    ("changes", "less", "more"),
    [
        pytest.param("rate", 2, 20, marks=pytest.mark.long),
        pytest.param("ttft", 2.0, 0.12, marks=pytest.mark.long),
        ("itl", 0.05, 0.006),
        pytest.param("output_len", 20, 60, marks=pytest.mark.long),
    ],
)
def test_more_load_or_stricter_targets_never_need_fewer_workers(
    changes: str, less: float, more: float
) -> None:
    def workers(value: float) -> int:
        asked: dict[str, Any] = {"output_len": 40, "rate": 10, changes: value}
        return sum(answered(**asked).pools)

    assert workers(less) <= workers(more)


@pytest.mark.all
def test_agents_run_in_a_closed_loop() -> None:
    load = replace(LOAD, agents=2)
    one, two = (predicted(SPEEDS, SPEEDS, load, Pools(1, decodes)).served for decodes in (1, 2))
    assert one.first is not None
    assert one.later is not None
    assert one.later.p50 < 0.5 * one.first.p50, "most of the prompt is cached"
    assert two.tokens_per_s < 1.5 * one.tokens_per_s, "they wait for their answers, and think"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ttft": 0.012}, "one prefill of 2000 tokens takes 50.4 ms"),
        ({"itl": 0.004}, "a step with a single request takes 4."),
        ({"input_len": 1_000_000, "ttft": 1e6, "itl": 1.0}, "needs more KV memory than one worker has"),
        ({"ttft": 0.04, "output_len": 1}, "one prefill of 2000 tokens takes 50.4 ms on an idle worker; a"),
        ({"ttft": 0.02}, "alone in the cluster has its first token after 37 ms"),
        ({"ttft": 0.02, "agents": 4}, "alone in the cluster has its first token after"),
        ({"rate": 9e4}, "--rate 90000: the load keeps some .* workers busy"),
    ],
)
def test_impossible_targets_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        answered(**changes)


@pytest.mark.all
def test_no_pool_is_sized_for_agents_that_begin_at_once() -> None:
    """Their first turns are a twentieth of all, so the p99 would be one of them."""
    few = answered(agents=16, ttft=0.5, itl=0.05)
    assert few.pools == Pools(1, 1)
    assert few.served.ttft.p99 < 0.5
    assert predicted(SPEEDS, SPEEDS, replace(LOAD, agents=16), few.pools).served.ttft.p99 > 1.0


@pytest.mark.all
def test_pools_that_cannot_keep_up_are_said_to() -> None:
    slow, fast = (predicted(SPEEDS, SPEEDS, replace(LOAD, rate=rate), Pools(1, 1)) for rate in (200, 10))
    assert slow.overloaded
    assert not fast.overloaded
    command = ["plan", "--rate", "200", "--prefill", "1", "--decode", "1"]
    assert "queues grow" in CliRunner().invoke(app, command).output


def test_a_search_ends_if_more_workers_bring_nothing() -> None:
    served = predicted(SPEEDS, SPEEDS, replace(LOAD, output_len=2), Pools(1, 1)).served
    targets = Targets(served.ttft.p99 / 2, 1.0)
    search = Search(lambda _: served, targets, in_memory=9, seats=9, rows=9, work=0.0)
    with pytest.raises(ValueError, match=r"workers would miss a target of --slo by 100%; allow more"):
        search.smallest(Pools(1, 1))


@pytest.mark.all
def test_kv_memory_or_max_num_seqs_can_limit_the_pool() -> None:
    def why(memory: int, **changes: Any) -> Answer:
        speeds = Speeds(replace(H200, memory=memory), REFERENCE)
        return answered(speeds, speeds, **changes)

    slow = {"ttft": 0.5, "itl": 1.0}
    assert "KV memory for 6 requests a worker decides" in why(23 << 30, **slow).why[1]
    assert "--max-num-seqs 4 decides" in why(139 << 30, max_num_seqs=4, **slow).why[1]
    with pytest.raises(ValueError, match=r"leave no room.*choose at least 2 for --prefill-tensor"):
        why(16 << 30)
    with pytest.raises(ValueError, match="no number of such GPUs is enough"):
        why(4 << 30)


def test_workers_of_several_gpus() -> None:
    """The bounds are those of two H200."""
    two = Speeds(H200, REFERENCE, ranks=2)
    for tokens in (2000, 8000):
        assert 1.65 < STEPS.prefill(tokens) / two.steps.prefill(tokens) < 1.85
    for batch in (1, 64):
        assert 1.45 < STEPS.decode(batch, batch * 1064) / two.steps.decode(batch, batch * 1064) < 1.8
    assert two.kv_room(0.9) > 2 * SPEEDS.kv_room(0.9), "the weights are there once"
    assert two.kv_bytes_per_token == SPEEDS.kv_bytes_per_token
    assert Speeds(H200, REFERENCE, ranks=16).kv_bytes_per_token == 2 * SPEEDS.kv_bytes_per_token
    with pytest.raises(ValueError, match="--tensor-parallel-size 3: the model has 32 query heads"):
        Speeds(H200, REFERENCE, ranks=3)


def test_each_pool_has_workers_of_its_own_size() -> None:
    two = Speeds(H200, REFERENCE, ranks=2)
    mixed = predicted(two, SPEEDS, LOAD, Pools(1, 1))
    alike = predicted(SPEEDS, SPEEDS, LOAD, Pools(1, 1))
    assert mixed.served.ttft.p50 < 0.7 * alike.served.ttft.p50
    assert mixed.kv_room == alike.kv_room
    large = Speeds(H200, replace(REFERENCE, num_layers=320), ranks=2)
    with pytest.raises(ValueError, match="a worker has one GPU; choose at least 2 for --prefill-tensor-par"):
        answered(Speeds(H200, replace(REFERENCE, num_layers=320)), large, ttft=9.0, itl=1.0)


def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    found = answered(output_len=1)
    assert found.pools.decode == 0
    assert found.served.ttft.p99 <= TARGETS.ttft


def test_measured_speeds(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    rows = {"engine.prefill.1x2000": 100, "engine.prefill.1x8000": 400}
    rows |= {"engine.decode.b1": 9, "engine.decode.b8": 10}
    file.write_text(json.dumps({"results": [{"name": n, "value": v} for n, v in rows.items()]}))
    slow = Speeds(measured(H200, file), REFERENCE).steps
    assert slow.prefill(4000) == pytest.approx(0.2, rel=0.02)
    assert slow.decode(8, 8 * 1064) == pytest.approx(0.010, rel=0.001)
    table = json.loads(json.dumps(asdict(SHAPE)))  # as `bench.engine` writes it
    report = {"results": json.loads(file.read_text())["results"], "detail": {STEP_MODEL: table}}
    report["detail"][ENCODE_TOKEN_SECONDS] = 2e-5
    file.write_text(json.dumps(report))
    assert Speeds(measured(H200, file), REFERENCE).encode_token_seconds == 2e-5
    own = Speeds(measured(H200, file), REFERENCE).steps
    assert own.decode_seconds == pytest.approx(SHAPE.decode_seconds), "the engine measured it"
    assert own.prompt_seconds == pytest.approx(SHAPE.prompt_seconds)
    assert (own.pair_seconds, own.overlap) == pytest.approx((SHAPE.pair_seconds, SHAPE.overlap))
    negative = report | {"detail": {ENCODE_TOKEN_SECONDS: -1}}
    table["decode_seconds"] = [0.009]
    for text in (json.dumps(report), json.dumps(negative), '{"results": []}', "no json", "[]"):
        file.write_text(text)
        with pytest.raises(ValueError, match="--measured"):
            measured(H200, file)


def test_rows_of_the_planned_model_are_not_scaled(tmp_path: Path) -> None:
    """Bamba has states, for which no other model says anything."""
    file = tmp_path / "engine.json"
    rows = {"engine.hybrid.prefill.1x2000": 62.1, "engine.hybrid.prefill.1x8000": 237}
    rows |= {
        "engine.hybrid.decode.b1": 5.15,
        "engine.hybrid.decode.b64": 9.90,
        "engine.hybrid.decode.b256": 24.8,
    }
    file.write_text(json.dumps({"results": [{"name": n, "value": v} for n, v in rows.items()]}))
    speeds = Speeds(measured(H200, file), model_config_from_hf(SHAPES[BAMBA], {}, BAMBA))
    for tokens in (2000, 8000):
        seconds = rows[f"engine.hybrid.prefill.1x{tokens}"] / 1e3
        assert speeds.prefill(tokens) == pytest.approx(seconds, rel=0.002)
    machine = speeds.machine(1064, 0.9, 256)
    for batch in (1, 64, 256):
        seconds = rows[f"engine.hybrid.decode.b{batch}"] / 1e3
        assert machine.step(batch, batch * 1064, []) == pytest.approx(seconds, rel=0.01)
    command = ["plan", "--model", str(write_shape(BAMBA, tmp_path)), "--measured", str(file), "--rate", "1"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    printed = CliRunner().invoke(app, ["plan", "--prefill", "1"])
    assert printed.exit_code == 2
    assert "give both" in printed.output


def test_a_shape_from_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"] | {"num_hidden_layers": 16}))
    assert opened(str(tmp_path)).config.num_layers == 16
    with pytest.raises(ValueError, match="--model nothing"):
        opened("nothing")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: must be a JSON object"):
        opened(str(tmp_path))


def test_a_plan_counts_each_module_in_its_format(tmp_path: Path) -> None:
    """As an engine that starts does: Q, K and V in several formats are one plain product."""
    save_quantized(tmp_path, "mixed", hidden_size=512, intermediate_size=512)
    checkpoint = opened(str(tmp_path))
    stored = planned_format(EngineConfig(str(tmp_path)), checkpoint, torch.device("cuda"))
    planned = weight_bytes(checkpoint.config, stored, torch.bfloat16)
    options: dict[str, object] = {
        "quantization": "auto",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "max_model_len": 64,
    }
    for bytes_more, fits in ((1000, True), (-1000, False)):
        memory = ceil((STEP_BYTES + planned + bytes_more) / 0.9)
        command = ["plan", "--model", str(tmp_path), "--gpu-memory", str(memory), "--rate", "0.001"]
        printed = CliRunner().invoke(app, command)
        assert ("leave no room for KV" not in printed.output) is fits, printed.output
        arguments = options, (None, None), 1, memory / (1 << 30), (0.9, 1, 0.0)
        if fits:
            assert computed(str(tmp_path), *arguments).ranks == (1, 1)
        else:
            with pytest.raises(TooLarge):
                computed(str(tmp_path), *arguments)


def test_the_command() -> None:
    printed = CliRunner().invoke(app, ["plan", "--rate", "20", "--slo", "ttft=500,itl=6.5"])
    assert printed.exit_code == 0, printed.output
    assert "TTFT decides" in printed.output
    assert "--ttft-target 500 --itl-target 6.5" in printed.output
    gpus = ["--prefill-tensor-parallel-size", "4", "--decode-tensor-parallel-size", "2"]
    printed = CliRunner().invoke(app, ["plan", "--rate", "8", *gpus])
    assert [line.split()[2:4] for line in printed.output.splitlines()[1:3]] == [["1", "4"], ["1", "2"]]
    assert "KV: bfloat16, 131,072 bytes a token" in printed.output
    line = "baton serve meta-llama/Llama-3.1-8B-Instruct --prefill 1 --decode 1"
    line += " --ttft-target 1000 --itl-target 50"
    line += " --prefill-tensor-parallel-size 4 --decode-tensor-parallel-size 2"
    assert printed.output.endswith(f"To serve it: {line}\n")
    assert HUB_NAMES.keys() == MODELS.keys()
    printed = CliRunner().invoke(app, ["plan", "--rate", "8", "--kv-cache-dtype", "fp8"])
    assert "KV: float8_e4m3fn, 67,584 bytes a token" in printed.output
    refused = CliRunner().invoke(app, ["plan", "--slo", "ttft=500"])
    assert refused.exit_code == 2
    assert "ttft=1000,itl=50" in refused.output


def test_baton_serve_takes_the_command_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all options of the plan that a cluster has, too."""
    served: list[Blueprint] = []
    monkeypatch.setattr("baton.cluster.serve.run", lambda blueprint: served.append(blueprint) or 0)
    options: dict[str, Any] = {
        "prefill_tensor_parallel_size": 4, "decode_tensor_parallel_size": 2, "kv_cache_dtype": "fp8",
        "state_dtype": "bfloat16", "gpu_memory_utilization": 0.8, "max_num_seqs": 8,
    }  # fmt: skip
    line = serve_line(SizingOptions(**options), Pools(2, 3), None, 1)
    result = CliRunner().invoke(app, line.split()[1:])
    assert result.exit_code == 0, result.output
    [blueprint] = served
    assert (blueprint.pool.prefill, blueprint.pool.decode, blueprint.pool.encode) == ((2, 2), (3, 3), 1)
    assert options.items() <= {**vars(blueprint.engine), **vars(blueprint.pool)}.items()


def test_a_model_with_states_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["plan", "--model", str(write_shape(BAMBA, tmp_path))])
    assert refused.exit_code == 2
    assert "BambaForCausalLM has state layers" in " ".join(refused.output.split())


def test_a_link_that_carries_little_leaves_prompts_to_the_workers_that_decode() -> None:
    narrow, wide, unknown = (
        predicted(SPEEDS, SPEEDS, replace(LOAD, rate=6, link_gbps=gbps), Pools(1, 1)).served
        for gbps in (10, 200, None)
    )
    assert narrow.handed_over < 0.1 < 0.5 < wide.handed_over
    assert wide.handed_over == unknown.handed_over
    assert narrow.second_token is not None
    assert narrow.second_token.p99 < 0.1, "2,000 tokens need 210 ms there"
