"""The kernels for INT4 weights against the values of the groups, on a GPU or in the interpreter."""

import pytest
import torch

from baton.engine.kernels import Kernels
from baton.engine.layers.weights import Groups
from tests.device import DEVICE
from tests.engine.test_groups import random_groups

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
        (128, 512, 64, 130, False),
        (64, 256, 64, 257, True),
    ],
)
def test_int4_products(
    size: int, columns: int, out: int, rows: int, symmetric: bool, dtype: torch.dtype, triton_kernels: Kernels
) -> None:
    """By each of the kernels: up to 2 rows, few rows, which may be split, and many rows. SwiGLU at the end of
    a product gives the same as SwiGLU of its result."""
    from baton.engine.kernels.quantized.int4_linear import Int4Linear

    codes, scales, zeros, bits = random_groups(out, columns, size).on(torch.device(DEVICE))
    rounded = Groups(codes, scales.to(dtype).float(), zeros.mul_(not symmetric).to(dtype).float(), bits)
    assert Int4Linear.suits(codes, scales, dtype)
    bias = torch.randn(out, device=DEVICE).to(dtype)
    linear = Int4Linear(codes, scales, zeros, bias, dtype, 3)
    weight = linear.dequantized()
    ulp = torch.finfo(dtype).eps  # the interpreter has no fused multiplication and addition
    torch.testing.assert_close(
        weight, rounded.values().to(dtype), rtol=ulp, atol=8 * ulp * scales.max().item()
    )
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    expected = x.float() @ weight.float().T + bias.float()
    error = 2e-3
    if rows <= 2:  # it sums in float16
        error += 0.006 * expected.square().mean().sqrt().item()
    for _ in range(2):  # the second one finds the counters of the splits as the first one left them
        torch.testing.assert_close(linear(x).float(), expected, rtol=2 * ulp, atol=error)
    gated = linear.silu_mul(x, triton_kernels)
    torch.testing.assert_close(gated, triton_kernels.silu_mul(linear(x)), rtol=2 * ulp, atol=0)
