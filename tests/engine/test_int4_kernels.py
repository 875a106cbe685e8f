"""The kernels for INT4 weights against the values of the groups, on a GPU or in the interpreter."""

import pytest
import torch

from tests.device import DEVICE
from tests.engine.test_groups import random_groups

F16 = torch.float16
DTYPES = [F16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "columns", "out", "rows"),
    [(32, 192, 40, 1), (32, 576, 100, 17), (64, 256, 64, 3), (128, 512, 130, 64), (128, 256, 64, 65)],
)
def test_int4_products(
    size: int, columns: int, out: int, rows: int, dtype: torch.dtype, kernel_device: str
) -> None:
    """Of few rows, which may be split, and of many."""
    from engine.kernels.int4_linear import Int4Linear

    groups = random_groups(out, columns, size).on(torch.device(kernel_device))
    assert Int4Linear.suits(groups.codes, groups.scales, dtype)
    bias = torch.randn(out, device=kernel_device).to(dtype)
    linear = Int4Linear(groups.codes, groups.scales, groups.zeros, bias, 3)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(kernel_device, dtype)
    expected = x.float() @ groups.values().T + bias.float()
    for _ in range(2):  # the second one finds the counters of the splits as the first one left them
        error = (linear(x).float() - expected).abs().max()
        assert error < (4e-3 if dtype is F16 else 2e-2) * expected.abs().max()
    exact = groups.values().to(dtype)
    torch.testing.assert_close(linear.dequantized(dtype), exact, rtol=1e-2, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_few_rows_are_faster_than_plain_ones(rows: int) -> None:
    """The products of a layer of an 8B model: they read a quarter of the bytes."""
    import triton

    from engine.kernels.int4_linear import Int4Linear

    groups = random_groups(14336, 4096, 128).on(torch.device(DEVICE))
    properties = torch.cuda.get_device_properties(DEVICE)
    linear = Int4Linear(groups.codes, groups.scales, groups.zeros, None, properties.multi_processor_count)
    x = torch.randn(rows, 4096, device=DEVICE).bfloat16()
    plain = groups.values().bfloat16()
    ours = triton.testing.do_bench_cudagraph(lambda: linear(x))
    theirs = triton.testing.do_bench_cudagraph(lambda: torch.nn.functional.linear(x, plain))
    print(f"{rows} rows: int4 {1e3 * ours:.1f} µs, bfloat16 {1e3 * theirs:.1f} µs")
    assert ours < theirs
