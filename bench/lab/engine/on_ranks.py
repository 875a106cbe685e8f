"""One engine over several devices against the same engine on one.

On GPUs: the shapes of Llama 3.1 8B and 70B with random weights. With `--model-shape qwen3-30b-a3b` a mixture
of experts, by tensor and by expert parallelism. On a CPU: the embedded model. Every engine runs in a child
process, this module. It reads its work as JSON from stdin, and prints what it measured as its last line.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec

from baton.bench.lab.driver import Run, gpus_or_exit, median_ms
from baton.bench.lab.engine.drive import answers, decode_step_seconds, greedy, prefill_seconds, prompt
from baton.bench.lab.shapes import MOE, write_shape
from baton.bench.report import Row
from baton.cluster.model import embedded_path
from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.execution.rank_files import RankFiles
from baton.processes.spawn import spawn
from baton.system import logs
from baton.system.python_path import python_path
from baton.worker.engine_process.start import RANK_MODULE, RankProcessConfig

SPEED_UP = {2: {"decode.b1": 1.45, "decode.b64": 1.6, "prefill.2000": 1.65, "prefill.8000": 1.7}}
"""What the 8B shape must reach over one rank, by ranks."""
LARGE_MS = {2: {"decode.b1": 20.5, "prefill.2000": 265.0}, 4: {"decode.b1": 11.5}}
"""What the 70B shape must take at most, by ranks."""
SAME = 8, 200, 48
"""Requests, prompt tokens and output tokens of the comparison of tokens."""


@dataclass(frozen=True)
class Work:
    """What a child process measures."""

    engine: dict[str, Any]  # fields of EngineConfig
    batches: list[int]  # of decode steps
    prompts: list[int]  # tokens of one prefill each
    context: int  # of decodes
    steps: int
    compared: bool = False  # whether to report tokens


def measure(run: Run) -> None:
    size = run.args.tensor_parallel_size
    if not run.on_gpus:
        # Without a bound on gaps, prompts fill the batch before the first request ends.
        engine: dict[str, Any] = {"model": str(embedded_path()), "dtype": "float32", "itl_target": 60.0}
        engine |= {"num_blocks": 512, "max_num_seqs": 16}
        work = Work(engine, [1, 16], [500], 128, 16, compared=True)
        _compare(work, size, run, {})
        return
    gpus_or_exit(size, f"--tensor-parallel-size {size}:")
    steps, shape = 32 if run.short else 128, partial(_shape, run)
    if run.args.model_shape == MOE:
        _experts(Work(shape(MOE, max_num_seqs=256), [1, 64, 256], [8000], 1064, steps), size, run)
        return
    tokens = Work(shape("llama-3.1-8b-two-layers", dtype="float32"), [], [], 0, 0, compared=True)
    _compare(tokens, size, run, {})
    work = Work(shape("llama-3.1-8b"), [1, 64], [2000, 8000], 1064, steps)
    _compare(work, size, run, SPEED_UP.get(size, {}))
    large = Work(shape("llama-3.1-70b"), [1, 64], [2000], 1064, steps)
    goals = LARGE_MS.get(size, {})
    for name, ms in _times(_child(large, size)).items():
        run.add(Row(f"engine.tp{size}.70b.{name}", ms, "ms", goal=goals.get(name)))


def _shape(run: Run, name: str, dtype: str = "bfloat16", max_num_seqs: int = 64) -> dict[str, Any]:
    return {
        "model": str(write_shape(name, run.directory)),
        "dtype": dtype,
        "device": "cuda",
        "load_format": "dummy",
        "max_model_len": 16384,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 16384,
        "itl_target": 60.0,
    }


def _compare(work: Work, size: int, run: Run, goals: Mapping[str, float]) -> None:
    """Adds the times of `size` ranks, and their ratio to one rank in the same run."""
    one, several = _child(work, 1), _child(work, size)
    _add_ratios(run, f"engine.tp{size}", _times(several), _times(one), "one rank", goals)
    if work.compared:
        pairs = [pair for of_one, of_all in zip(one["tokens"], several["tokens"], strict=True)
                 for pair in zip(of_one, of_all, strict=True)]  # fmt: skip
        same = sum(a == b for a, b in pairs) / len(pairs)
        run.add(Row(f"engine.tp{size}.same_tokens", 100 * same, "%", goal=100.0, better="higher"))


def _experts(work: Work, size: int, run: Run) -> None:
    """Adds the times of `size` ranks that have a part of every expert (`tp`), and whole experts (`ep`). The
    first are compared with one rank, the second with the first."""
    before, base = _times(_child(work, 1)), "one rank"
    for form, expert_parallel in (("tp", False), ("ep", True)):
        engine = work.engine | {"enable_expert_parallel": expert_parallel}
        times = _times(_child(replace(work, engine=engine), size))
        _add_ratios(run, f"engine.{form}{size}.moe", times, before, base, {})
        before, base = times, "a part of every expert"


Times = Mapping[str, float]
"""Milliseconds, by kind of work."""


def _add_ratios(run: Run, prefix: str, times: Times, before: Times, base: str, goals: Times) -> None:
    for name, ms in times.items():
        ratio, to = before[name] / ms, f"{base}, same run"
        goal = goals.get(name)
        run.add(Row(f"{prefix}.{name}", ms, "ms", ratio=ratio, ratio_to=to, goal=goal, better="higher"))


@contextmanager
def running(config: EngineConfig) -> Iterator[Engine]:
    """Builds an engine. Rank 0 is this process, the others are its children, which end with the context."""
    size = config.tensor_parallel_size
    files = RankFiles.create(size) if size > 1 else None
    children = []
    try:
        for rank in range(1, size):
            assert files is not None
            log = logs.log_config("text", "warning", {"process": f"rank {rank}"})
            start = RankProcessConfig(
                name=f"rank {rank}", title="baton", parent_pid=os.getpid(), rank=rank, files=files,
                logging=log, engine=config, arenas=None,
            )  # fmt: skip
            children.append(spawn("-m", RANK_MODULE, given=msgspec.json.encode(start), pass_fds=start.fds))
        engine = build_engine(config, files=files)
        yield engine
        engine.close()
        assert [child.wait(30) for child in children] == [0] * len(children), "a rank failed"
    finally:
        for child in children:
            child.kill()
            child.wait()
        if files is not None:
            files.close()


def _times(measured: dict[str, Any]) -> dict[str, float]:
    """Medians in ms, by kind of work."""
    return {name: median_ms(seconds) for name, seconds in measured["seconds"].items()}


def _child(work: Work, size: int) -> dict[str, Any]:
    fields = asdict(work)
    fields["engine"]["tensor_parallel_size"] = size
    child = subprocess.run(
        [sys.executable, "-m", "baton.bench.lab.engine.on_ranks"],
        input=json.dumps(fields), stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | python_path(),
    )  # fmt: skip
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    work = Work(**json.load(sys.stdin))
    with running(EngineConfig(**work.engine)) as engine:
        seconds: dict[str, list[float]] = {}
        for tokens in work.prompts:
            series = [prefill_seconds(engine, [prompt(tokens, seed + tokens)]) for seed in range(6)]
            seconds[f"prefill.{tokens}"] = series[1:]
        for batch in work.batches:
            seconds[f"decode.b{batch}"] = decode_step_seconds(engine, batch, work.context, work.steps)
        count, length, output = SAME
        compared = [greedy(prompt(length, seed), output) for seed in range(count if work.compared else 0)]
        measured = {"seconds": seconds, "tokens": answers(engine, compared)}
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
