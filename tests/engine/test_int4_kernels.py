"""The kernels for INT4 weights against the values of the groups, on a GPU or in the interpreter."""

import pytest
import torch

from baton.engine.kernels import Choice, Experts, FourBits, Kernels
from baton.engine.kernels.quantized.reference import four_bits, of_experts, spread
from baton.engine.layers.weights import Groups
from baton.engine.model_config import Scoring
from tests.device import DEVICE
from tests.engine.kernel_checks import close, normal
from tests.engine.test_groups import random_groups

pytestmark = pytest.mark.all

F16 = torch.float16
DTYPES = [F16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "columns", "out", "rows", "symmetric"),
    [
        (32, 96, 40, 1, False),
        (32, 576, 100, 9, True),
        (32, 192, 30, 3, True),
        (64, 256, 64, 4, False),
        (128, 640, 130, 17, True),
        (128, 8320, 20, 2, True),  # wide, and a second pass over the columns
        (128, 256, 208, 70, True),
        (32, 160, 48, 40, False),
        (64, 256, 64, 130, True),
        (64, 256, 40, 33, True),  # no rows of W that cuBLAS takes in FP8
    ],
)
def test_int4_products(
    size: int, columns: int, out: int, rows: int, symmetric: bool, dtype: torch.dtype, triton_kernels: Kernels
) -> None:
    """By each of the kernels: up to 2 rows, few rows, which may be split, and more rows, in FP8. SwiGLU at
    the end of a product gives the same as SwiGLU of its result."""
    from baton.engine.kernels.quantized.four_bits import values
    from baton.engine.kernels.quantized.int4_linear import ALIGNED, FORMS, MAX_FEW_ROWS, Int4Linear

    codes, scales, zeros = random_groups(out, columns, size).on(torch.device(DEVICE))[:3]
    rounded = Groups(codes, scales.to(dtype).float(), zeros.mul_(not symmetric).to(dtype).float(), 4)
    bias = torch.randn(out, device=DEVICE).to(dtype)
    linear = Int4Linear(four_bits(codes, scales, zeros, dtype), bias, 3)
    weight = values(linear.weight)
    ulp = torch.finfo(dtype).eps  # the interpreter has no fused multiplication and addition
    for found in (weight, linear.weight.exact().to(dtype)):
        torch.testing.assert_close(
            found, rounded.values().to(dtype), rtol=ulp, atol=8 * ulp * scales.max().item()
        )
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    in_fp8 = rows > MAX_FEW_ROWS and out % ALIGNED == 0
    assert linear.quantizes(rows) is (False if in_fp8 else None)
    multiplied, quantized = x.float(), triton_kernels.quantize(x, grouped=False)
    if in_fp8:
        of_rows = linear.weight.row_scales()
        small = values(linear.weight, of_rows)
        # Where it rounds up to a power of two, the interpreter gives half of it.
        wrong = (small.float() * of_rows.T - weight).abs() > 2**-4 * weight.abs() + of_rows.T / 2
        assert wrong.float().mean() <= (0.05 if DEVICE == "cpu" else 0)
        weight, multiplied = small.float() * of_rows.T, spread(*quantized)
    expected = multiplied @ weight.float().T + bias.float()
    error = 2e-3
    if rows <= 2:  # it sums in float16
        error += 0.006 * expected.square().mean().sqrt().item()
    for _ in range(2):  # the second one finds the counters of the splits as the first one left them
        torch.testing.assert_close(linear(x).float(), expected, rtol=2 * ulp, atol=error)
    if in_fp8:
        for form in FORMS:
            found = linear.triton(quantized, form).float()
            torch.testing.assert_close(found, expected, rtol=2 * ulp, atol=error)
    gated = linear.silu_mul(x, triton_kernels)
    torch.testing.assert_close(gated, triton_kernels.silu_mul(linear(x)), rtol=2 * ulp, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "size", "symmetric", "floats"),
    [
        (2, 32, True, True),
        (10, 128, False, False),
        (22, 32, False, False),
        (60, 64, True, False),
        (210, 32, True, True),
    ],
)
def test_experts_in_four_bits(
    tokens: int, size: int, symmetric: bool, floats: bool, dtype: torch.dtype, triton_kernels: Kernels
) -> None:
    """All tilings; columns that fill no block; rows that fill no tile. The reference has the exact values."""

    def experts(out: int, columns: int) -> FourBits:
        codes, scales, zeros = random_groups(out, columns, size)[:3]
        each = [
            four_bits(codes.roll(i, 0), scales * (i + 1), zeros * (not symmetric), dtype, floats=floats)
            for i in range(4)
        ]
        return of_experts(each)

    def placed(weight: FourBits) -> FourBits:
        words, scales, zeros = (None if x is None else x.to(DEVICE) for x in weight[:3])
        assert words is not None
        assert scales is not None
        return weight._replace(words=words, scales=scales, zeros=zeros)

    hidden, inner, chosen = {128: (256, 128), 64: (192, 64), 32: (96, 32)}[size] + (4,)
    gate_up, down = experts(2 * inner, hidden), experts(hidden, inner)
    x, logits = normal(tokens, hidden, seed=3).to(dtype), normal(tokens, 4, seed=4)
    choice, counts = Choice(chosen, Scoring.NORMALIZED_SOFTMAX), torch.zeros(4, dtype=torch.int32)
    expected = Kernels().mix_experts(x.float(), logits, Experts(gate_up, down, choice), counts.clone())
    held = Experts(placed(gate_up), placed(down), choice)
    close(triton_kernels.mix_experts(x.to(DEVICE), logits.to(DEVICE), held, counts.to(DEVICE)), expected)
