"""The frontier of first tokens and gaps: what first and later turns of agents wait, and the longest gaps.

Baton with gap targets of two to seven fastest steps, and as many engines with the rules of vLLM (chunks of
512) and of SGLang (prompts at once, decodes wait) on the same machines. One worker computes every prompt
beside its decodes. Of two, one may compute prompts while the other decodes.
"""

from collections import Counter
from collections.abc import Sequence

from baton.bench.lab.disagg.loads import turns_beside
from baton.bench.lab.driver import Run
from baton.bench.report import Row
from baton.engine.core.meters import LONG
from baton.simulator.agents import agents
from baton.simulator.placement import Kind, simulate
from baton.simulator.placement_outcome import PlacementOutcome
from baton.steps.quantiles import percentile

CASES = {"agents8.w1": (8, 1), "agents24.w1": (24, 1), "agents16.w2": (16, 2), "agents48.w2": (48, 2)}
"""Sessions at a time, and workers."""
TARGETS = (2.0, 2.5, LONG, 5.0, 7.0)
"""Of gaps, in fastest steps."""
OTHERS: dict[str, Kind] = {"vllm": "colocated", "sglang": "sglang"}
SEEDS = (4, 5, 6)
"""None of them has chosen a rule."""


def add_frontier(run: Run) -> None:
    sides: list[tuple[str, Kind, float]] = [(f"steps{steps:g}", "policy", steps) for steps in TARGETS]
    sides += [(name, kind, LONG) for name, kind in OTHERS.items()]
    seeds = SEEDS[:1] if run.short else SEEDS
    for case, (sessions, workers) in CASES.items():
        for side, kind, steps in sides:
            outcomes = [_served(sessions, workers, kind, steps, seed) for seed in seeds]
            for metric, value in figures(outcomes).items():
                run.add(Row(f"routing_sim.frontier.{case}.{side}.{metric}", value, "ms"))


def _served(sessions: int, workers: int, kind: Kind, steps: float, seed: int) -> PlacementOutcome:
    return simulate(
        agents(sessions, turns_beside(sessions), seed),
        kind,
        at_a_time=sessions,
        warm_up=0,
        seed=seed,
        workers=workers,
        target_steps=steps,
    )


def figures(outcomes: Sequence[PlacementOutcome]) -> dict[str, float]:
    """In ms. The answers of all outcomes count as those of one."""
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    first, later = ([a.ttft for a in answers if a.first is turn] for turn in (True, False))
    gaps = Counter[float]()
    for outcome in outcomes:
        gaps.update(outcome.gaps)
    values, counts = [*gaps], [*gaps.values()]
    return {
        "first_p50": 1e3 * percentile(first, 0.5),
        "first_p90": 1e3 * percentile(first, 0.9),
        "later_p50": 1e3 * percentile(later, 0.5),
        "later_p90": 1e3 * percentile(later, 0.9),
        "gap_p99": 1e3 * percentile(values, 0.99, counts),
        "gap_longest": 1e3 * max(gap for gap, count in gaps.items() if count),
        "latency_p90": 1e3 * percentile([answer.latency for answer in answers], 0.9),
    }
