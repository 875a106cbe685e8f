"""A sum over ranks with the residual add and norm after it, by each algorithm, in CUDA graphs, by rows.

`python -m baton.bench.engine.all_reduce RANK RANKS STORE` is one rank. Rank 0 prints JSON: µs by algorithm,
rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from baton.bench.contract import Report, Row
from baton.engine.execution.cuda_ranks import CudaRanks
from baton.engine.kernels import kernels_for

ROWS = (1, 8, 32, 64, 128, 256, 1024, 2000, 8000)
HIDDEN = 4096
REPEATS = 50
"""Sums in one graph."""


def measure(report: Report, ranks: int) -> None:
    """Adds a row for each algorithm and number of rows of bfloat16. `chosen` is what the engine does."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        commands = [
            [sys.executable, "-m", "baton.bench.engine.all_reduce", str(rank), str(ranks), store]
            for rank in range(ranks)
        ]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "a rank failed"
    for algorithm, by_rows in json.loads(outputs[0].splitlines()[-1]).items():
        for rows, microseconds in by_rows.items():
            report.add(Row(f"engine.tp{ranks}.sum_norm.{algorithm}.{rows}", microseconds, "µs"))


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    device = torch.device("cuda", rank)
    ranks = CudaRanks(rank, size, dist.FileStore(sys.argv[3], size), device)
    kernels, ops = kernels_for(device, 128), torch.ops.symm_mem
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    memory = symmetric_memory.empty(max(ROWS) * HIDDEN, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(memory, name)
    measured: dict[str, dict[int, float]] = {}
    for rows in ROWS:
        x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
        shared = memory[: x.numel()].view(x.shape)

        def norm(x: Tensor, residual: Tensor = residual, weight: Tensor = weight) -> None:
            kernels.add_rms_norm(residual, x, weight, 1e-5)

        def one_shot(x: Tensor = x, shared: Tensor = shared, norm: Callable[..., None] = norm) -> None:
            norm(ops.one_shot_all_reduce_copy_out(shared, x, "sum", name, x))

        def two_shot(x: Tensor = x, shared: Tensor = shared, norm: Callable[..., None] = norm) -> None:
            shared.copy_(x)
            norm(ops.two_shot_all_reduce_out(shared, "sum", name, x))

        def nccl(x: Tensor = x, norm: Callable[..., None] = norm) -> None:
            dist.all_reduce(x)
            norm(x)

        def chosen(x: Tensor = x, residual: Tensor = residual, weight: Tensor = weight) -> None:
            ranks.add_rms_norm(kernels, residual, x, weight, 1e-5)

        for work in (one_shot, two_shot, nccl, chosen):
            measured.setdefault(work.__name__, {})[rows] = _microseconds(work)
    torch.cuda.synchronize()
    if rank == 0:
        print(json.dumps(measured), flush=True)


def _microseconds(work: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            work()
    times = []
    for _ in range(7):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(1e3 * began.elapsed_time(ended) / REPEATS)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
