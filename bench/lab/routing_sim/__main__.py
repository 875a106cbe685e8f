"""Compares the router's policies with simpler ones, in simulated clusters.

Prefill: the chats of `bench.routing_sim.traces` on 4, 64 and 1,000 workers behind 4 routers (1 before
1,000), as fast as an H200, with a load of 0.8 and with caches that live sessions fill to 90 %. One case has
workers that join and leave. Think times depend on how many sessions a worker has between two turns, which
keeps runs short.

Placement: five kinds of load on 2, 4 and 64 workers, and one on 1,000. The policy is compared with colocated
engines that take requests in turn and compute them in steps of 512 tokens, and with a fixed split. `--only
placement` takes some minutes and prints a table of it.

Swing: 4 workers whose load swings between long prompts and long answers: each fixed split, flips by the
autoscaler, and the placement policy. A short run leaves this part out, unless --only names it.

Split: prompts of 30,000 and 128,000 tokens that up to four of 4, 64 and 1,000 prefill workers share, one
after another, at half of the load that the workers can serve, and at 0.8 of it beside no splits.

Agents: 16, 48 and 96 sessions at a time, and a public trace, on 2 workers, with prefix caches (`agents`).

Frontier: first tokens against gaps, beside the rules of vLLM and SGLang (`frontier`). Short runs leave it
out, unless --only names it.

Profiles: what each value of `--optimize` gives on 2 workers, with a load that they can serve and with more.
"""

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.routing_sim.agents import add_agents
from baton.bench.lab.routing_sim.baselines import POLICIES, Flips
from baton.bench.lab.routing_sim.frontier import add_frontier
from baton.bench.lab.routing_sim.traces import Sized, multi_turn, size
from baton.bench.report import Row
from baton.cluster.options.optimize import PROFILES
from baton.router.policy.prefill import PrefillPolicy
from baton.simulator import placement
from baton.simulator.placement_outcome import PlacementOutcome, Quantiles
from baton.simulator.step_worker import BUDGET
from baton.simulator.steps import step_seconds
from baton.steps.quantiles import percentile

MAIN = 64
"""Workers of the rows that have bounds."""
SCALES = {4: (4, 400, 60), MAIN: (4, 75, 20), 1_000: (1, 15, 8)}
"""Workers → routers, sessions of the trace per worker, sessions between two turns per worker."""
SHORT = {4: 0.4, MAIN: 0.3, 1_000: 0.12}
"""Share of the sessions of a short run."""
AT_SCALE = ("sticky", "least_loaded")
"""Policies of a short run with 1,000 workers."""
LEAVING = 4
"""Workers that leave in the middle of a trace, and come back later."""
SEED = 1
LOADS = {
    (2000, 150): (8, 12, 22),
    (8000, 200): (1, 2, 3, 4),
    (500, 500): (6, 12, 24),
    (200, 20): (40, 80),
    (30_000, 100): (0.5, 0.8),
}
"""(prompt, answer) → requests per second for each two workers."""
PLACED = {2: 1, 4: 1, MAIN: 4, 1_000: 16}
"""Workers of a placement → routers."""
PLACED_SHORT = (2, MAIN)
PLACED_SECONDS = 10.0
"""Of a placement, at least: workers report once a second."""
PLACED_REQUESTS, PLACED_REQUESTS_SHORT = 600, 200
"""Of a placement, at least."""
LARGEST_LOADS = ((2000, 150, 12),)
"""Loads of 1,000 workers."""
KINDS: tuple[placement.Kind, ...] = ("policy", "split", "colocated")
SPLIT_PROMPTS, SPLIT_SHORT = 600, 40
"""Prompts of each simulation, and of a short run."""
SPLIT_GOALS = {"idle": (0.0, 0.34), "half": (0.5, 0.6)}
"""Share of the time of the workers that is used, and the goal beside one idle engine."""
SPLIT_IDLE = 0.05
"""Of the time of one worker, for prompts that come one after another."""
SPLIT_BUSY = 0.8
"""The same share, at which no split may make p99 worse."""
SWING, SWING_SECONDS = ((2000, 50, 28), (200, 500, 28)), 30.0
"""Loads of 4 workers that take turns, and for how long each of them comes."""
SWING_TTFT, SWING_GAP = 0.25, 0.02
"""Objectives of each request in seconds; the gap is the mean of a request."""
OPTIMIZED = {(2000, 150): (22, 80), (500, 500): (24, 80)}
"""As `LOADS`, for profiles. Two workers cannot serve 80 of these requests per second."""


def cases(short: bool) -> Iterator[tuple[str, int, Sized, list[placement.Change], list[str]]]:
    """Name, workers, load, changes and policies of each comparison."""
    for workers, (_, sessions, between) in SCALES.items():
        requests = round(6 * sessions * workers * (SHORT[workers] if short else 1))
        names = list(AT_SCALE if short and workers == max(SCALES) else POLICIES)
        load = size(multi_turn(requests, SEED), workers=workers, sessions=between)
        yield f"multi_turn.w{workers}", workers, load, [], names
        if workers == MAIN:
            last = load.sessions[-1][0]
            changes = [
                placement.Change(share * last, row, pool)
                for share, pool in ((0.5, None), (0.7, "prefill"))
                for row in range(LEAVING)
            ]
            yield f"multi_turn.w{workers}.changes", workers, load, changes, ["sticky"]


def prefilled(
    workers: int, load: Sized, changes: Sequence[placement.Change], policy: PrefillPolicy
) -> PlacementOutcome:
    """Serves requests for one token with prefill workers."""
    return placement.simulate(
        load.sessions, "policy", warm_up=0.4, workers=workers, prefills=workers, routers=SCALES[workers][0],
        seed=SEED, machine=load.machine, policy=policy, changes=changes,
        prefix_fetches=False,
    )  # fmt: skip


def hits(outcome: PlacementOutcome) -> float:
    return sum(a.cached for a in outcome.answers) / sum(a.prompt for a in outcome.answers)


def add_rows(run: Run, case: str, policy: str, outcome: PlacementOutcome) -> None:
    name, busy = f"routing_sim.{case}.{policy}", outcome.busy.values()
    run.add(Row(f"{name}.hits", hits(outcome), "of prompt tokens"))
    run.add_median(f"{name}.ttft", outcome.ttft, "ms", scale=1e3)
    run.add(Row(f"{name}.imbalance", max(busy) / statistics.mean(busy), "max busy / mean"))


def add_bounds(run: Run, sticky: PlacementOutcome, least_loaded: PlacementOutcome) -> None:
    """The rows that have goals."""
    run.add(Row("routing_sim.hits.sticky", hits(sticky), "of prompt tokens", goal=0.45, better="higher"))
    p99, base = (1e3 * percentile(o.ttft, 0.99) for o in (sticky, least_loaded))
    name = "routing_sim.ttft_p99.vs_least_loaded"
    run.add(Row(name, p99, "ms", ratio=p99 / base, ratio_to="least loaded", goal=1.0))


def placed_loads(workers: int, short: bool) -> Iterator[placement.Load]:
    """All rates of each load for 2 workers, the highest for more. Short runs have one load for those."""
    if workers == max(PLACED) or (short and workers > 2):
        yield from (placement.Load(*load) for load in LARGEST_LOADS)
        return
    for (prompt, answer), rates in LOADS.items():
        yield from (placement.Load(prompt, answer, rate) for rate in (rates if workers == 2 else rates[-1:]))


def add_placement(run: Run) -> None:
    """Also prints a table with TTFT p50/p99 · gap p99 in ms."""
    lines = ["workers, routers | input/output, rate /s | " + " | ".join(KINDS)]
    for workers in PLACED_SHORT if run.short else PLACED:
        for load in placed_loads(workers, run.short):
            min_requests = PLACED_REQUESTS_SHORT if run.short else PLACED_REQUESTS
            seconds = PLACED_SECONDS / (5 if run.short else 1)
            requests = max(min_requests, round(load.rate * workers / 2 * seconds))
            served = {"requests": requests, "workers": workers, "routers": PLACED[workers], "seed": SEED}
            by_kind = {kind: placement.simulate(load, kind, **served).quantiles() for kind in KINDS}
            name = f"routing_sim.placement.{load.prompt}_{load.answer}.{load.rate:g}.w{workers}"
            add_placed(run, name, by_kind)
            cells = (
                f"{1e3 * q.ttft:.0f}/{1e3 * q.ttft_p99:.0f} · {1e3 * q.gap_p99:.1f}" for q in by_kind.values()
            )
            setting = f"{workers:,}, {PLACED[workers]} | {load.prompt}/{load.answer}, {load.rate:g}"
            lines.append(f"{setting} | " + " | ".join(cells))
    print("\n".join(lines))


def add_placed(run: Run, name: str, quantiles: dict[placement.Kind, Quantiles]) -> None:
    policy, colocated = quantiles["policy"], quantiles["colocated"]
    for metric, goal in (("ttft_p99", 1.1), ("gap_p99", 1.0)):
        value, other = 1e3 * getattr(policy, metric), 1e3 * getattr(colocated, metric)
        run.add(Row(f"{name}.{metric}", value, "ms", ratio=value / other, ratio_to="colocated", goal=goal))
    ratio = policy.ttft_p99 / quantiles["split"].ttft_p99
    run.add(Row(f"{name}.ttft", 1e3 * policy.ttft, "ms", ratio=ratio, ratio_to="p99 of a fixed split"))
    run.add(Row(f"{name}.first_gap_p99", 1e3 * policy.first_gap_p99, "ms"))


def add_swing(run: Run) -> None:
    loads = [placement.Load(*load) for load in SWING]
    requests = round(2 * len(loads) * SWING_SECONDS * 2 * loads[0].rate)

    def goodput(kind: placement.Kind, prefills: int, *, flip: bool = False) -> float:
        flips = Flips(most=3, ttft=SWING_TTFT, gap=SWING_GAP, seats=placement.SEATS) if flip else None
        outcome = placement.simulate(
            lambda now: loads[int(now / SWING_SECONDS) % len(loads)], kind, requests=requests, workers=4,
            prefills=prefills, flips=flips, seed=SEED, ttft_target=SWING_TTFT,
        )  # fmt: skip
        return outcome.goodput(SWING_TTFT, SWING_GAP)

    splits = {prefills: goodput("split", prefills) for prefills in (1, 2, 3)}
    for prefills, share in splits.items():
        run.add(Row(f"routing_sim.swing.split.{prefills}p{4 - prefills}d", share, "of requests"))
    best = max(splits.values())
    placed: dict[str, tuple[placement.Kind, bool]] = {
        "flips": ("split", True), "policy": ("policy", False), "policy_flips": ("policy", True)
    }  # fmt: skip
    for name, (kind, flip) in placed.items():
        share = goodput(kind, 2, flip=flip)
        run.add(
            Row(
                f"routing_sim.swing.{name}", share, "of requests", ratio=share / best,
                ratio_to="best fixed split", goal=1.1, better="higher",
            )
        )  # fmt: skip


def add_profiles(run: Run) -> None:
    requests = 2 * PLACED_REQUESTS_SHORT if run.short else 4 * PLACED_REQUESTS
    for (prompt, answer), rates in OPTIMIZED.items():
        for rate, (name, profile) in itertools.product(rates, PROFILES.items()):
            outcome = placement.simulate(
                placement.Load(prompt, answer, rate), "policy", requests=requests, seed=SEED,
                seats=profile.max_num_seqs[-1], target_steps=profile.target_steps,
            )  # fmt: skip
            case, quantiles = f"routing_sim.optimize.{prompt}_{answer}.{rate}.{name}", outcome.quantiles()
            run.add(Row(f"{case}.ttft", 1e3 * quantiles.ttft, "ms", p99=1e3 * quantiles.ttft_p99))
            run.add(Row(f"{case}.gap_p99", 1e3 * quantiles.gap_p99, "ms"))
            run.add(Row(f"{case}.output", requests * answer / outcome.seconds, "tokens/s"))


def alone_seconds(tokens: int) -> float:
    """Time in which one idle worker computes a prompt."""
    starts = range(0, tokens, BUDGET)
    return sum(step_seconds(0, 0, [(min(BUDGET, tokens - start), start)]) for start in starts)


def shared(tokens: int, load: float, workers: int, prompts: int, *, splits: bool) -> PlacementOutcome:
    """Serves prompts that take the share `load` of the time of so many prefill workers. A fifth as many more
    workers decode the second token."""
    decodes = max(1, workers // 5)
    rate = 2 * load * workers / alone_seconds(tokens) / (workers + decodes)
    return placement.simulate(
        placement.Load(tokens, 2, rate), "policy", requests=prompts, workers=workers + decodes,
        prefills=workers, seed=SEED, splits=splits,
    )  # fmt: skip


def add_split(run: Run) -> None:
    prompts = SPLIT_SHORT if run.short else SPLIT_PROMPTS
    for workers, tokens in itertools.product(SCALES, (30_000, 128_000)):
        alone = alone_seconds(tokens)
        for name, (load, goal) in SPLIT_GOALS.items():
            outcome = shared(tokens, load or SPLIT_IDLE / workers, workers, prompts, splits=True)
            case, ttft = f"routing_sim.split.{tokens}.{name}.w{workers}", outcome.ttft
            run.add_median(
                f"{case}.ttft", ttft, "ms", scale=1e3,
                ratio=statistics.median(ttft) / alone, ratio_to="one idle engine", goal=goal,
            )  # fmt: skip
            run.add(Row(f"{case}.first_gap_p99", 1e3 * outcome.quantiles().first_gap_p99, "ms"))
        split, base = (
            shared(tokens, SPLIT_BUSY, workers, prompts, splits=splits).quantiles()
            for splits in (True, False)
        )
        case, p99 = f"routing_sim.split.{tokens}.busy.w{workers}", split.ttft_p99
        ratio = p99 / base.ttft_p99
        run.add(
            Row(f"{case}.ttft_p99", 1e3 * p99, "ms", ratio=ratio, ratio_to="no prompt is split", goal=1.0)
        )
        run.add(Row(f"{case}.first_gap_p99", 1e3 * split.first_gap_p99, "ms"))


def add_prefill(run: Run) -> None:
    for case, workers, load, changes, names in cases(run.short):
        outcomes = {name: prefilled(workers, load, changes, POLICIES[name]) for name in names}
        for name, outcome in outcomes.items():
            add_rows(run, case, name, outcome)
        if case == f"multi_turn.w{MAIN}":
            add_bounds(run, outcomes["sticky"], outcomes["least_loaded"])


PARTS = {
    "prefill": add_prefill, "placement": add_placement, "swing": add_swing, "split": add_split,
    "profiles": add_profiles, "agents": add_agents, "frontier": add_frontier,
}  # fmt: skip


LONG_PARTS = ("swing", "frontier")


def measure(run: Run) -> None:
    run.parameters["seed"] = SEED
    only = run.args.only
    for name in [only] if only else [part for part in PARTS if part not in LONG_PARTS or not run.short]:
        PARTS[name](run)


BENCH = Bench(
    "routing_sim",
    measure,
    __doc__,
    options=(
        Option("--only", "simulate this part", choices=PARTS),
        Option("--trace", "for agents: another trace in Mooncake's form", type=Path, metavar="PATH"),
    ),
    devices=("cpu",),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
