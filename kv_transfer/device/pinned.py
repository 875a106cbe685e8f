"""Pins memory that torch has not allocated, for copies to and from a GPU."""

from __future__ import annotations

import torch


def pin(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    assert cudart is not None
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error:
        raise RuntimeError(f"cannot pin {memory.numel()} bytes: CUDA error {error}")


def unpin(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    assert cudart is not None
    error = int(cudart.cudaHostUnregister(memory.data_ptr()))
    assert error == 0, f"cudaHostUnregister: CUDA error {error}"
