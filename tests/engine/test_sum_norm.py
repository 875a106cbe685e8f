"""The sum over ranks with its norm, as one kernel, against torch.

A rank is a process here, which Triton's interpreter runs in shared memory. On a GPU a rank is a stream of one
process, so that one device is enough.
"""

import mmap
import multiprocessing
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE

SIZE = 96
CALLS = (3, 1, 40, 2, 5, 3, 90)
"""Rows of each call. 90 do not fit into the memory at once."""
NBYTES = 1 << 16
EPS = 1e-5


def given(call: int, ranks: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weight, residual, and the term of each rank."""
    generator = torch.Generator().manual_seed(call)
    weight, residual, *terms = (
        torch.randn(rows, SIZE, generator=generator) for rows in (1, *[CALLS[call]] * (ranks + 1))
    )
    return weight[0], residual, terms


def work(rank: int, addresses: list[int], nbytes: int) -> list[tuple[Tensor, Tensor]]:
    """All calls of one rank: the residual stream and its norm."""
    from engine.kernels.sum_norm import SumNorm

    sum_norm = SumNorm(rank, addresses, nbytes, torch.device(DEVICE))
    found = []
    for call in range(len(CALLS)):
        weight, residual, terms = given(call, len(addresses))
        weight, residual, term = (x.to(DEVICE) for x in (weight, residual, terms[rank]))
        found.append((residual, sum_norm(residual, term, weight, EPS)))
    return found


def in_processes(ranks: int, nbytes: int) -> list[list[tuple[Tensor, Tensor]]]:
    """A fork sees the memory at the same address."""
    memory = mmap.mmap(-1, ranks * nbytes)
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    addresses = [first + rank * nbytes for rank in range(ranks)]
    with multiprocessing.get_context("fork").Pool(ranks) as pool:
        return pool.starmap(_numbers, [(rank, addresses, nbytes) for rank in range(ranks)], chunksize=1)


def _numbers(rank: int, addresses: list[int], nbytes: int) -> list[tuple[Tensor, Tensor]]:
    torch.set_num_threads(1)
    return [(x.numpy(), y.numpy()) for x, y in work(rank, addresses, nbytes)]  # type: ignore[misc]


def in_streams(ranks: int, nbytes: int) -> list[list[tuple[Tensor, Tensor]]]:
    memory = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=DEVICE)
    addresses = [row.data_ptr() for row in memory]
    torch.cuda.synchronize()
    found = []
    for rank in range(ranks):
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(work(rank, addresses, nbytes))
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_sum_and_its_norm(kernel_device: str, ranks: int) -> None:
    from engine.kernels.sum_norm import MAX_ROWS

    run: Callable[..., list[list[tuple[Tensor, Tensor]]]] = in_processes if DEVICE == "cpu" else in_streams
    found = run(ranks, MAX_ROWS * ranks * 8 + NBYTES)
    for call in range(len(CALLS)):
        weight, residual, terms = given(call, ranks)
        total = residual + sum(terms)
        norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
        first = [torch.as_tensor(x).cpu() for x in found[0][call]]
        torch.testing.assert_close(first, [total, norm])
        for other in found[1:]:
            for ours, same in zip(other[call], first, strict=True):
                assert torch.equal(torch.as_tensor(ours).cpu(), same)
