"""An all-reduce by each algorithm, in CUDA graphs, by number of rows.

`python -m bench.engine.all_reduce RANK RANKS STORE` is one rank. Rank 0 prints JSON: µs by algorithm, rows.
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

from bench.contract import Report, Row
from engine.execution.cuda_ranks import CudaRanks

ROWS = (1, 8, 32, 64, 128, 256, 1024, 2000, 8000)
HIDDEN = 4096
REPEATS = 50
"""All-reduces in one graph."""


def measure(report: Report, ranks: int) -> None:
    """Adds a row for each algorithm and number of rows of bfloat16. `chosen` is what the engine does."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        commands = [
            [sys.executable, "-m", "bench.engine.all_reduce", str(rank), str(ranks), store]
            for rank in range(ranks)
        ]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "a rank failed"
    for algorithm, by_rows in json.loads(outputs[0].splitlines()[-1]).items():
        for rows, microseconds in by_rows.items():
            report.add(Row(f"engine.tp{ranks}.all_reduce.{algorithm}.{rows}", microseconds, "µs"))


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    device = torch.device("cuda", rank)
    ranks = CudaRanks(rank, size, dist.FileStore(sys.argv[3], size), device)
    ops, name = torch.ops.symm_mem, ranks._name
    measured: dict[str, dict[int, float]] = {}
    for rows in ROWS:
        x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        shared = ranks._memory[: x.nbytes].view(x.dtype).view(x.shape)

        def two_shot(x: torch.Tensor = x, shared: torch.Tensor = shared) -> None:
            shared.copy_(x)
            ops.two_shot_all_reduce_out(shared, "sum", name, x)

        algorithms: dict[str, Callable[[], object]] = {
            "one_shot": lambda x=x, shared=shared: ops.one_shot_all_reduce_copy_out(
                shared, x, "sum", name, x
            ),
            "two_shot": two_shot,
            "nccl": lambda x=x: dist.all_reduce(x),
            "chosen": lambda x=x: ranks.all_reduce(x),
        }
        for algorithm, work in algorithms.items():
            measured.setdefault(algorithm, {})[rows] = _microseconds(work)
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
