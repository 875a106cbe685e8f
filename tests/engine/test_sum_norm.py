"""The sum over ranks with its norm, as one kernel, against torch.

A rank is a process here, which Triton's interpreter runs in shared memory. On a GPU a rank is a stream of one
process, so that one device is enough.
"""

import mmap
import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE

SIZE = 96
CALLS = (3, 1, 40, 2, 5, 3, 90)
"""Rows of each call. 90 do not fit into the memory at once."""
NBYTES = 1 << 16
MANY = 100
"""More rows than any call has."""
EPS = 1e-5


def given(call: int, ranks: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weight, residual, and the term of each rank."""
    generator = torch.Generator().manual_seed(call)
    weight, residual, *terms = (
        torch.randn(rows, SIZE, generator=generator) for rows in (1, *[CALLS[call]] * (ranks + 1))
    )
    return weight[0], residual, terms


def in_processes(ranks: int, nbytes: int) -> list[list[Tensor]]:
    """What each rank gets: the residual stream and its norm, call by call. A fork sees the memory at the same
    address."""
    memory = mmap.mmap(-1, ranks * nbytes)
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    addresses = [first + rank * nbytes for rank in range(ranks)]
    with multiprocessing.get_context("fork").Pool(ranks) as pool:
        found = pool.starmap(_calls, [(rank, addresses, nbytes) for rank in range(ranks)], chunksize=1)
    return [[torch.from_numpy(x) for x in of_rank] for of_rank in found]


def _calls(rank: int, addresses: list[int], nbytes: int) -> list[Any]:
    from engine.kernels.sum_norm import SumNorm

    torch.set_num_threads(1)
    sum_norm = SumNorm(rank, addresses, nbytes, torch.device("cpu"))
    found = []
    for call in range(len(CALLS)):
        weight, residual, terms = given(call, len(addresses))
        norm = sum_norm(residual, terms[rank], weight, EPS)
        found += [residual.numpy(), norm.numpy()]
    return found


def in_streams(ranks: int, nbytes: int) -> list[list[Tensor]]:
    """As `in_processes`. The host must be able to launch all ranks while one of them waits. So all tensors
    are there before, and each kernel has been loaded by a call that waits for no rank."""
    from engine.kernels.sum_norm import SumNorm

    def calls(memory: Tensor) -> list[list[Tensor]]:
        addresses = [row.data_ptr() for row in memory]
        ends = [SumNorm(rank, addresses, nbytes, torch.device(DEVICE)) for rank in range(ranks)]
        inputs = [
            (
                weight.to(DEVICE),
                [residual.to(DEVICE) for _ in range(ranks)],
                [term.to(DEVICE) for term in terms],
            )
            for weight, residual, terms in (given(call, ranks) for call in range(len(CALLS)))
        ]
        torch.cuda.synchronize()
        found: list[list[Tensor]] = [[] for _ in range(ranks)]
        for weight, residuals, terms in inputs:
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    norm = ends[rank](residuals[rank], terms[rank], weight, EPS)
                    found[rank] += [residuals[rank], norm]
        torch.cuda.synchronize()
        return [[x.cpu() for x in of_rank] for of_rank in found]

    streams = [torch.cuda.Stream() for _ in range(ranks)]
    memory = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=DEVICE)
    counts = memory.view(torch.int64)[:, : MANY * ranks].view(ranks, MANY, ranks)
    counts.fill_(1 << 40)  # all other ranks have called often
    for rank in range(ranks):
        counts[rank, :, rank] = 0
    calls(memory)
    return calls(memory.zero_())


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_sum_and_its_norm(kernel_device: str, ranks: int) -> None:
    from engine.kernels.sum_norm import MAX_ROWS

    run = in_processes if DEVICE == "cpu" else in_streams
    found = run(ranks, MAX_ROWS * ranks * 8 + NBYTES)
    for call in range(len(CALLS)):
        weight, residual, terms = given(call, ranks)
        total = residual + sum(terms)
        norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
        results = [of_rank[2 * call : 2 * call + 2] for of_rank in found]
        torch.testing.assert_close(results[0], [total, norm])
        for other in results[1:]:
            for ours, same in zip(other, results[0], strict=True):
                assert torch.equal(ours, same)
