"""`bench.kernels` on a CPU, in Triton's interpreter: each case runs as on a GPU, without its clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from baton.bench.lab.kernels import cases as bench
from baton.bench.lab.kernels.cases import Cases, DenseCases, Shape

pytestmark = pytest.mark.all

TINY = Shape(
    heads=4, kv_heads=2, head_dim=16, inner=64, vocabulary=300, block_size=16, dtype=torch.float16,
    batches=(1, 2), context=3, prompts=(17, 70),
)  # fmt: skip


def one_second_each(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    for call in calls:
        call()
    return lambda: float(len(calls))


@pytest.fixture
def cases(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> Cases:
    from baton.engine.kernels.triton_kernels import TritonKernels

    monkeypatch.setattr(bench, "BEYOND_CACHE", 0)
    monkeypatch.setattr(bench, "LEAST_CALLS", 1)
    device = torch.device(kernel_device)
    return DenseCases(TINY, TritonKernels(device, TINY.head_dim), device)


def test_every_case_runs_and_makes_rows(cases: Cases) -> None:
    rows = {row.name: row for make in cases for row in bench.rows_of(make, one_second_each)}
    for name in (
        "add_rms_norm.t1", "silu_mul.t17", "rope_and_write.t17", "decode_attention.b2",
        "decode_attention.b2.ragged", "prefill_attention.70", "prefill_attention.17.after51",
        "linear.gate_up.t2",
    ):  # fmt: skip
        assert rows[f"kernels.{name}.time"].value == 1e6, "a second, in µs"
    # 4 rows of 64 elements of 2 bytes: residual in and out, delta, result
    assert rows["kernels.add_rms_norm.t1"].value == pytest.approx(4 * 64 * 2 / 1e9)
    assert rows["kernels.add_rms_norm.t1.of_limit"].value == pytest.approx(4 * 64 * 2 / 4.8e12)
    assert rows["kernels.linear.gate_up.t2"].ratio == 1.0


def test_every_case_of_a_mixture_runs(cases: Cases) -> None:
    from baton.bench.lab.kernels import moe

    shape = moe.MoeShape(experts=6, chosen=2, hidden=32, inner=16, tokens=(1, 9), dtype=torch.float16)
    moe_cases = moe.MoeCases(shape, cases.kernels, cases.device)
    rows = {row.name: row for make in moe_cases for row in bench.rows_of(make, one_second_each)}
    assert {name for name in rows if name.endswith(".time")} == {
        f"kernels.{name}.time"
        for tokens in (1, 9)
        for name in (f"moe_gate_up.t{tokens}", f"moe_down.t{tokens}")
    }
    one_token = 2 * (32 + 2 * 32 * 32 + 2 * 16)  # in, the weights of two experts, out
    assert rows["kernels.moe_gate_up.t1"].value == pytest.approx(one_token / 1e9)


def test_every_case_of_state_layers_runs(cases: Cases) -> None:
    from baton.bench.lab.kernels.states import Mamba2Cases, Mamba2Shape

    shape = Mamba2Shape(
        heads=4, head_dim=16, state_size=16, groups=2, dtype=torch.float16, batches=(2,), prompts=((2, 140),)
    )
    mamba2_cases = Mamba2Cases(shape, cases.kernels, cases.device)
    rows = {row.name: row for make in mamba2_cases for row in bench.rows_of(make, one_second_each)}
    assert rows["kernels.ssd.2x140.time"].value == 1e6
    # projected and y of two rows, and the inputs and states of two requests, both ways
    moved = 2 * 2 * (128 + 4 + 64) + 2 * 2 * (2 * 3 * 128 + 4 * 4 * 16 * 16)
    assert rows["kernels.mamba2.decode.b2"].value == pytest.approx(moved / 1e9)


@pytest.mark.parametrize(("name", "groups"), [("gated_delta", 1), ("kda", 2)])
def test_every_case_of_delta_rules_runs(cases: Cases, name: str, groups: int) -> None:
    from baton.bench.lab.kernels.states import DeltaCases, DeltaShape

    shape = DeltaShape(
        heads=2, head_dim=16, state_size=16, groups=groups, of_keys=name == "kda", dtype=torch.float16,
        batches=(2,), prompts=((2, 35),),
    )  # fmt: skip
    delta_cases = DeltaCases(shape, cases.kernels, cases.device)
    rows = {row.name: row for make in delta_cases for row in bench.rows_of(make, one_second_each)}
    assert rows[f"kernels.{name}.2x35.time"].value == 1e6
    channels, steps = 32 + 32 * groups, 2 if name == "gated_delta" else 32
    moved = 2 * 2 * (channels + steps + 2 + 32) + 2 * 2 * (2 * 3 * channels + 4 * 2 * 16 * 16)
    assert rows[f"kernels.{name}.decode.b2"].value == pytest.approx(moved / 1e9)


def test_every_case_of_latents_runs(cases: Cases) -> None:
    from baton.bench.lab.kernels.latent import LatentCases, LatentShape

    shape = LatentShape(
        heads=(4,),
        rank=32,
        nope=16,
        rope=16,
        value=16,
        batches=(2,),
        context=100,
        chunks=(5,),
        dtype=torch.float16,
    )
    latent_cases = LatentCases(shape, cases.kernels, cases.device)
    rows = {row.name: row for make in latent_cases for row in bench.rows_of(make, one_second_each)}
    for name in ("absorbed_decode.h4.b2", "absorbed_chunk.h4.t5", "expanded_chunk.h4.t5"):
        assert rows[f"kernels.{name}.time"].value == 1e6
    # the latents of two blocks a request, queries of two tokens there and back, and what the heads make
    moved = 2 * (2 * 128 * 48 + 2 * 2 * 4 * 32 + 4 * 32 * 32)
    assert rows["kernels.absorbed_decode.h4.b2"].value == pytest.approx(moved / 1e9)


def test_every_case_of_fp8_runs(cases: Cases) -> None:
    from baton.bench.lab.kernels.quantized import Fp8Cases

    fp8_cases = Fp8Cases(replace(TINY, prompts=(17,)), cases.kernels, cases.device)
    with pytest.MonkeyPatch.context() as patch:  # torch has no such product on a CPU
        patch.setattr("baton.engine.kernels.quantized.fp8_linear.Fp8Linear.cublas", lambda self, x: None)
        rows = {row.name: row for make in fp8_cases for row in bench.rows_of(make, one_second_each)}
    parts = [f"fp8_{name}" for name in ("layer", "linear.down")]
    assert {f"kernels.{part}.t{count}.time" for part in parts for count in (1, 2, 17)} <= {*rows}
    assert rows["kernels.fp8_layer.t17"].ratio == 1.0


def test_every_case_of_int4_runs(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.bench.lab.kernels.quantized import Int4Cases

    monkeypatch.setattr("baton.engine.kernels.quantized.int4_linear.MAX_FEW_ROWS", 16)  # a prompt has more
    # Of groups of 128 columns.
    shape = replace(TINY, heads=8, inner=128, batches=(1,), prompts=(17,))
    int4_cases = Int4Cases(shape, cases.kernels, cases.device)
    rows = {row.name: row for make in int4_cases for row in bench.rows_of(make, one_second_each)}
    names = [f"{part}.t{count}" for part in ("layer", "linear.down") for count in (1, 17)]
    assert {f"kernels.int4_{name}.time" for name in names} <= {*rows}
