"""Agents and a public trace: sessions whose prompts are mostly cached.

Agents: all sessions share a prefix, each has a context of its own, and each prompt holds the whole history. A
closed loop: when a session ends, the next one begins.

Trace: requests at their times, in Mooncake's form (FAST 2025, https://github.com/kvcache-ai/Mooncake, Apache
License 2.0). `samples/conversation.jsonl` has the first 150 seconds of its conversation trace, without the
hash ids of blocks that only one request has.

Both are served by the policy on 1P1D, and by two colocated engines that each session is bound to. All workers
have as much memory. Some cases of agents have other workers: a GPU half as fast with a model four times as
large, workers with vLLM (`--engine vllm`), one of these alone, and 64 workers. There are as many engines.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from baton.bench.lab.driver import Run
from baton.bench.load.traffic.trace import MOONCAKE_BLOCK, read_trace
from baton.bench.report import Row
from baton.kv_names import CHUNK_TOKENS
from baton.simulator.agents import agents, chunk_name
from baton.simulator.placement import Kind, simulate
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.steps import H200_8B, HALF_32B, Machine, of_vllm
from baton.simulator.trace import Session, Turn
from baton.steps.quantiles import percentile


class Case(NamedTuple):
    """`sessions` at a time."""

    sessions: int
    turns: int
    workers: int = 2
    routers: int = 1
    machine: Machine = H200_8B
    vllm: bool = False
    """Whether the workers have vLLM, as colocated engines always have. They share steps as Baton's engine."""
    seeds: Sequence[int] = (1, 2, 3)


MAIN = "agents48"
"""Its rows have bounds."""
CASES = {
    "agents16": Case(16, 10),
    MAIN: Case(48, 8),
    "agents96": Case(96, 8),
    "agents16.half_32b": Case(16, 8, machine=HALF_32B),
    "agents16.vllm": Case(16, 10, vllm=True),
    "agents48.vllm": Case(48, 8, vllm=True),
    "agents24.vllm1": Case(24, 10, workers=1, vllm=True),
    "agents1536.w64": Case(1536, 2, workers=64, routers=4, seeds=(1,)),
}
KINDS: tuple[Kind, Kind] = ("policy", "colocated")
SEED = 1
GOALS = {"latency_p90": (0.9, "lower"), "tokens": (1.0, "higher")}
"""Of a row, beside colocated engines."""
TRACE = Path(__file__).parent / "samples" / "conversation.jsonl"
TRACE_SECONDS, TRACE_SPEED = 150.0, 0.5
"""The part of the trace that runs, and how fast."""
CLUMP_SECONDS = 3.0
"""Between two times of the trace, which have several requests each."""


def trace(path: Path) -> list[tuple[float, Session]]:
    """Returns the requests of a trace, at half its speed. Each is a session of one turn, and has the key of
    its second block: all requests share the first one. Requests with the same time are spread evenly until
    the next time."""
    lines = [line for line in read_trace(path) if line.timestamp < 1e3 * TRACE_SECONDS]
    clumps, numbers = Counter(line.timestamp for line in lines), Counter[float]()
    sessions = list[tuple[float, Session]]()
    for number, line in enumerate(lines):
        at = line.timestamp / 1e3 + CLUMP_SECONDS * numbers[line.timestamp] / clumps[line.timestamp]
        numbers[line.timestamp] += 1
        tokens, answer = line.input_length, max(2, line.output_length)
        shared = min(len(line.hash_ids) * MOONCAKE_BLOCK, tokens) // CHUNK_TOKENS
        per_block = MOONCAKE_BLOCK // CHUNK_TOKENS
        chunks = tuple(chunk_name(f"block {line.hash_ids[i // per_block]}", i) for i in range(shared))
        chunks += tuple(
            chunk_name(f"request {number}", i) for i in range(shared, (tokens + answer) // CHUNK_TOKENS)
        )
        key = chunks[per_block] if len(chunks) > per_block else chunk_name(f"request {number}", 0)
        sessions.append((at / TRACE_SPEED, Session(key, (Turn(tokens, chunks, 0.0, answer),), per_block)))
    return sessions


def add_agents(run: Run) -> None:
    for name in (MAIN,) if run.short else CASES:
        case = CASES[name]
        seeds = case.seeds[:1] if run.short else case.seeds
        outcomes = {kind: [_served(case, kind, seed) for seed in seeds] for kind in KINDS}
        _add(run, f"routing_sim.{name}", outcomes, bounds=name == MAIN)
    sessions = trace(run.args.trace or TRACE)
    outcomes = {kind: [simulate(sessions, kind, warm_up=0, seed=SEED)] for kind in KINDS}
    _add(run, "routing_sim.trace", outcomes, bounds=True)


def _served(case: Case, kind: Kind, seed: int) -> PlacementOutcome:
    return simulate(
        agents(case.sessions, case.turns, seed),
        kind,
        at_a_time=case.sessions,
        warm_up=0,
        seed=seed,
        workers=case.workers,
        routers=case.routers,
        machine=of_vllm(case.machine) if case.vllm and kind == "policy" else case.machine,
    )


def _add(run: Run, name: str, outcomes: dict[Kind, list[PlacementOutcome]], *, bounds: bool) -> None:
    """Adds the rows of one load. The answers of all seeds count as those of one run."""
    policy, base = (_figures(outcomes[kind]) for kind in KINDS)
    for row, (value, p99, unit) in policy.items():
        ratio = value / base[row][0]
        run.add(Row(f"{name}.{row}", value, unit, p99=p99, ratio=ratio, ratio_to="colocated"))
        if bounds and row in GOALS:
            goal, better = GOALS[row]
            to: dict[str, Any] = {"ratio": ratio, "ratio_to": "colocated", "goal": goal, "better": better}
            run.add(Row(f"{name}.{row}.vs_colocated", value, unit, **to))


def _figures(outcomes: Sequence[PlacementOutcome]) -> dict[str, tuple[float, float | None, str]]:
    """Returns the value, its p99 if there are 100 samples, and the unit of each figure."""
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    first, later = ([a.ttft for a in answers if a.first is turn] for turn in (True, False))
    gaps = Counter[float]()
    for outcome in outcomes:
        gaps.update(outcome.gaps)
    latency = [answer.latency for answer in answers]
    seconds = statistics.mean(outcome.seconds for outcome in outcomes)
    tokens = sum(a.tokens for a in answers) / len(outcomes) / seconds
    cached = sum(a.cached for a in answers) / sum(a.prompt for a in answers)
    figures: dict[str, tuple[float, float | None, str]] = {}
    for metric, values in (("ttft_first", first), ("ttft_later", later)):
        if values:
            p99 = 1e3 * percentile(values, 0.99) if len(values) >= 100 else None
            figures[metric] = 1e3 * statistics.median(values), p99, "ms"
    values, counts = [*gaps], [*gaps.values()]
    gap, gap_p99 = (1e3 * percentile(values, q, counts) for q in (0.5, 0.99))
    return figures | {
        "gap": (gap, gap_p99, "ms"),
        "latency": (1e3 * statistics.median(latency), 1e3 * percentile(latency, 0.99), "ms/token"),
        "latency_p90": (1e3 * percentile(latency, 0.9), None, "ms/token"),
        "tokens": (tokens, None, "tokens/s"),
        "cached": (cached, None, "of prompt tokens"),
    }
