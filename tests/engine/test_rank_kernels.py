"""Kernels that write to the memory of other ranks, against torch.

A rank is a process here, which Triton's interpreter runs in shared memory. On a GPU a rank is a stream of one
process, so that one device is enough.
"""

import mmap
import multiprocessing
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from baton.engine.execution.cuda_ranks import CudaRanks
from tests.device import DEVICE

pytestmark = pytest.mark.all

SIZE = 96
ROWS = (3, 1, 40, 2, 5, 3, 90)
"""Rows of each call. `SumNorm` cannot hold 90 at once."""
NBYTES = 1 << 16
EPS = 1e-5
VOCABULARY = 10_001
"""Columns of which each rank has a part: more than one tile, and fewer on the last rank."""
WORDS = (5, 1, 2500, 3)
"""Of each broadcast: less than a tile, and more."""

Call = Callable[[], list[Tensor]]
Rank = Callable[[int, list[int], int], list[Call]]
"""Makes the calls of a rank: `(rank, addresses, nbytes)`. They return tensors to compare."""


def given(call: int, ranks: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weight, residual, and the term of each rank."""
    generator = torch.Generator().manual_seed(call)
    weight, residual, *terms = (
        torch.randn(rows, SIZE, generator=generator) for rows in (1, *[ROWS[call]] * (ranks + 1))
    )
    return weight[0], residual, terms


def sum_norm(rank: int, addresses: list[int], nbytes: int) -> list[Call]:
    from baton.engine.kernels.sum_norm import SumNorm

    end = SumNorm(rank, addresses, nbytes, torch.device(DEVICE))

    def run(weight: Tensor, residual: Tensor, term: Tensor) -> list[Tensor]:
        return [end(residual, term, weight, EPS), residual]

    inputs = (given(call, len(addresses)) for call in range(len(ROWS)))
    return [partial(run, w.to(DEVICE), x.to(DEVICE), terms[rank].to(DEVICE)) for w, x, terms in inputs]


def logits_of(call: int) -> Tensor:
    return torch.randn(call + 1, VOCABULARY, generator=torch.Generator().manual_seed(call))


def gather(rank: int, addresses: list[int], nbytes: int) -> list[Call]:
    """Several calls follow each other without a meeting."""
    from baton.engine.kernels.peer_copy import PeerCopy

    end, share = PeerCopy(rank, addresses, nbytes, torch.device(DEVICE)), -(-VOCABULARY // len(addresses))
    parts = [logits_of(call).split(share, dim=1)[rank].to(DEVICE).contiguous() for call in range(4)]
    assert all(end.can_gather(len(part), share, 4) for part in parts)
    assert not end.can_gather(5, share, 4)
    return [lambda part=part: [end.gather(part, VOCABULARY)][: rank == 0] for part in parts]


def broadcast(rank: int, addresses: list[int], nbytes: int) -> list[Call]:
    from baton.engine.kernels.peer_copy import PeerCopy

    end = PeerCopy(rank, addresses, nbytes, torch.device(DEVICE))

    def run(words: Tensor) -> list[Tensor]:
        assert end.can_broadcast(words)
        end.broadcast(words)
        return [words]

    return [partial(run, torch.arange(count, device=DEVICE) * (rank + 1) + count) for count in WORDS]


def _in_process(make: Rank, rank: int, addresses: list[int], nbytes: int) -> list[object]:
    torch.set_num_threads(1)
    return [x.numpy() for call in make(rank, addresses, nbytes) for x in call()]


def in_processes(make: Rank, ranks: int, nbytes: int) -> list[list[Tensor]]:
    """The results of each rank. A fork sees the memory at the same address."""
    memory = mmap.mmap(-1, ranks * nbytes)
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    addresses = [first + rank * nbytes for rank in range(ranks)]
    with multiprocessing.get_context("fork").Pool(ranks) as pool:
        args = [(make, rank, addresses, nbytes) for rank in range(ranks)]
        found = pool.starmap(_in_process, args, chunksize=1)
    return [[torch.from_numpy(x) for x in of_rank] for of_rank in found]


def in_streams(make: Rank, ranks: int, nbytes: int) -> list[list[Tensor]]:
    """As `in_processes`. The host must be able to launch all ranks while one of them waits. So all tensors
    are there before, and each kernel has been loaded by a call that waits for no rank."""

    def run(memory: Tensor) -> list[list[Tensor]]:
        calls = [make(rank, [row.data_ptr() for row in memory], nbytes) for rank in range(ranks)]
        torch.cuda.synchronize()
        found: list[list[Tensor]] = [[] for _ in range(ranks)]
        for of_ranks in zip(*calls, strict=True):
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[rank] += of_ranks[rank]()
        torch.cuda.synchronize()
        return [[x.cpu() for x in of_rank] for of_rank in found]

    streams = [torch.cuda.Stream() for _ in range(ranks)]
    memory = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=DEVICE)
    tiles = (nbytes - NBYTES) // (8 * ranks)  # at least those that have counts
    counts = memory.view(torch.int64)[:, : tiles * ranks].view(ranks, tiles, ranks)
    counts.fill_(1 << 40)  # all other ranks have called often
    for rank in range(ranks):
        counts[rank, :, rank] = 0
    run(memory)
    return run(memory.zero_())


run_ranks = in_processes if DEVICE == "cpu" else in_streams


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_sum_and_its_norm(kernel_device: str, ranks: int) -> None:
    from baton.engine.kernels.sum_norm import MAX_ROWS

    found = run_ranks(sum_norm, ranks, MAX_ROWS * ranks * 8 + NBYTES)
    for call in range(len(ROWS)):
        weight, residual, terms = given(call, ranks)
        total = residual + sum(terms)
        norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
        results = [of_rank[2 * call : 2 * call + 2] for of_rank in found]
        torch.testing.assert_close(results[0], [norm, total])
        for other in results[1:]:
            for ours, same in zip(other, results[0], strict=True):
                assert torch.equal(ours, same)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_0_gathers_the_columns_of_all(kernel_device: str, ranks: int) -> None:
    from baton.engine.kernels.peer_copy import counts_bytes

    # Room for 4 rows.
    inboxes = 4 * (ranks - 1) * -(-VOCABULARY // ranks) * 4
    found, *others = run_ranks(gather, ranks, counts_bytes(ranks) + max(inboxes, NBYTES))
    assert others == [[]] * (ranks - 1)
    for call, logits in enumerate(found):
        assert torch.equal(logits, logits_of(call))


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_what_rank_0_has(kernel_device: str, ranks: int) -> None:
    from baton.engine.kernels.peer_copy import counts_bytes

    for words in run_ranks(broadcast, ranks, counts_bytes(ranks) + NBYTES):
        for found, count in zip(words, WORDS, strict=True):
            assert torch.equal(found, torch.arange(count) + count)


def test_nvlink_multicast_is_off_when_nccl_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the process says."""
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    for name in (*off, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "another")

    def start(*_: object, **__: object) -> None:
        assert off.items() <= os.environ.items()
        raise RuntimeError("NCCL starts")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(dist, "init_process_group", start)
    with pytest.raises(RuntimeError, match="NCCL starts"):
        CudaRanks(0, 2, dist.HashStore(), torch.device("cuda", 0))
