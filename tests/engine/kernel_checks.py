"""What tests of kernels share: the types, random numbers, and how close two results must be."""

import pytest
import torch
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, pytest.param(BF16, marks=pytest.mark.gpu)]
CLOSE = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}
"""Largest error, relative to the size of what is compared."""


def close(ours: Tensor, reference: Tensor, bound: float | None = None) -> None:
    """`reference` is in float64 or float32, `ours` in the dtype that sets the bound."""
    assert ours.isfinite().all()
    error = (ours.cpu().double() - reference.double()).norm() / reference.double().norm()
    assert error <= (bound or CLOSE[ours.dtype]), f"relative error {float(error):.2e}"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
