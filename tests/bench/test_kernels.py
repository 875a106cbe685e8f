"""`bench.kernels` on a CPU, in Triton's interpreter: each case runs as on a GPU, without its clock."""

from collections.abc import Callable, Sequence

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
