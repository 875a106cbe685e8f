"""The kernels for weights of 4 and 8 bits against their values, on a GPU or in the interpreter."""

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
    ("size", "columns", "out", "rows", "kind"),
    [
        (32, 96, 40, 1, "zeros"),
        (32, 576, 100, 9, "symmetric"),
        (32, 192, 30, 3, "symmetric"),
        (64, 256, 64, 4, "zeros"),
        (128, 640, 130, 17, "symmetric"),
        (128, 8320, 20, 2, "symmetric"),  # wide, and a second pass over the columns
        (128, 256, 208, 70, "symmetric"),
        (32, 160, 48, 40, "zeros"),
        (64, 256, 64, 130, "symmetric"),
        (64, 256, 40, 33, "symmetric"),  # no rows of W that cuBLAS takes in FP8
        (16, 208, 40, 1, "floats"),
        (32, 160, 48, 2, "floats"),
        (16, 336, 130, 17, "floats"),
        (16, 160, 48, 40, "floats"),
    ],
)
def test_int4_products(
    size: int, columns: int, out: int, rows: int, kind: str, dtype: torch.dtype, triton_kernels: Kernels
) -> None:
    """By each of the kernels: up to 2 rows, few rows, which may be split, and more rows, in FP8. SwiGLU at
    the end of a product gives the same as SwiGLU of its result."""
    from baton.engine.kernels.quantized.four_bits import values
    from baton.engine.kernels.quantized.int4_linear import ALIGNED, FORMS, MAX_FEW_ROWS, Int4Linear

    codes, scales, zeros = random_groups(out, columns, size).on(torch.device(DEVICE))[:3]
    floats, zeros = kind == "floats", zeros * (kind == "zeros")
    rounded = Groups(codes, scales.to(dtype).float(), zeros.to(dtype).float(), 4, floats=floats)
    bias = torch.randn(out, device=DEVICE).to(dtype)
    linear = Int4Linear(four_bits(codes, scales, zeros, dtype, floats=floats), bias, 3)
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
    if rows <= 2 and not floats:  # it sums in float16
        error += 0.006 * expected.square().mean().sqrt().item()
    for _ in range(2):  # the second one finds the counters of the splits as the first one left them
        torch.testing.assert_close(linear(x).float(), expected, rtol=2 * ulp, atol=error)
    if in_fp8:
        for form in FORMS:
            found = linear.triton(quantized, form).float()
            torch.testing.assert_close(found, expected, rtol=2 * ulp, atol=error)
    gated = linear.silu_mul(x, triton_kernels)
    torch.testing.assert_close(gated, triton_kernels.activate(linear(x)), rtol=2 * ulp, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "columns", "out", "rows", "symmetric"),
    [
        (32, 96, 40, 1, False),
        (None, 336, 100, 3, True),
        (None, 1040, 20, 2, False),  # in parts
        (128, 1152, 70, 16, True),  # in parts
        (256, 512, 65, 70, False),
        (64, 320, 64, 130, True),
        (None, 144, 30, 17, True),
    ],
)
def test_int8_products(
    size: int | None, columns: int, out: int, rows: int, symmetric: bool, dtype: torch.dtype,
    triton_kernels: Kernels,
) -> None:  # fmt: skip
    """By each of the kernels. A weight is rounded once, as one that is dequantized at load."""
    from baton.engine.kernels.quantized.int8_linear import Int8Linear

    groups = random_groups(out, columns, size or columns, 8)
    groups = groups._replace(zeros=groups.zeros * (not symmetric)).on(torch.device(DEVICE))
    bias = torch.randn(out, device=DEVICE).to(dtype)
    linear, weight = Int8Linear(*groups[:3], bias, dtype, 12), groups.values().to(dtype)
    # The interpreter has no fused multiplication and addition: where a value is between two, it may differ.
    torch.testing.assert_close(linear.values(), weight, rtol=torch.finfo(dtype).eps, atol=1e-6)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    expected = (x.float() @ linear.values().float().T + bias.float()).to(dtype)
    for product in (linear, linear.triton, linear.triton, linear.cublas):  # the counters are as before
        torch.testing.assert_close(product(x), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "size", "symmetric", "floats"),
    [
        (2, 32, True, True),
        (10, 128, False, False),
        (22, 32, False, False),
        (60, 64, True, False),
        (210, 32, True, True),
        (22, 16, True, True),
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

    hidden, inner, chosen = {128: (256, 128), 64: (192, 64), 32: (96, 32), 16: (80, 48)}[size] + (4,)
    gate_up, down = experts(2 * inner, hidden), experts(hidden, inner)
    x, logits = normal(tokens, hidden, seed=3).to(dtype), normal(tokens, 4, seed=4)
    choice, counts = Choice(chosen, Scoring.NORMALIZED_SOFTMAX), torch.zeros(4, dtype=torch.int32)
    expected = Kernels().mix_experts(x.float(), logits, Experts(gate_up, down, choice), counts.clone())
    held = Experts(placed(gate_up), placed(down), choice)
    close(triton_kernels.mix_experts(x.to(DEVICE), logits.to(DEVICE), held, counts.to(DEVICE)), expected)
