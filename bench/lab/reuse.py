"""How much sooner the second turn of a chat begins if KV is reused, and how many bytes travel for it.

A prefill and a decode worker run as real processes. The bench submits to both as a router does. Rounds of
four second turns alternate; each has a history, an answer, and a few new tokens:

second_turn   the prefill worker has the history, and the decode worker has history and answer
from_decode   the decode worker alone has both
on_decode     the same, and the decode worker computes the new tokens itself
computed      no worker has any of it: as many tokens that no prompt had before

The rows are times to first token, as ratios to `computed`. `bytes_over_missing` is the KV that the decode
worker received in `second_turn`, over the KV that it lacked: positions in no full block of its prefix cache.

With `--kv-connector auto` workers read KV from memory of each other, and rows are named
`reuse.cuda.auto.second_turn`. The report has the transport that was used among its parameters.

On GPUs it is the 8B Llama shape with random weights. Two GPUs have a worker each; one has both.
"""

import asyncio
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from baton.bench.lab.driver import MIN_PAIRS, Bench, Option, Run, median_ms
from baton.bench.lab.harness.cluster import MODEL, LocalCluster, two_workers
from baton.bench.lab.harness.workers import Workers, prompt_of, request
from baton.bench.report import Row
from baton.rpc import worker_pb2 as pb
from baton.steps.quantiles import percentile

NEW_TOKENS = 32


class Turns(NamedTuple):
    """Tokens of the parts of a second turn."""

    history: int
    answer: int


ON_CPU, SHORT_ON_CPU, ON_CUDA = Turns(700, 40), Turns(400, 24), Turns(8000, 200)
KINDS = ("second_turn", "from_decode", "on_decode", "computed")
# Over `computed`.
GOALS = {
    "cpu": {"second_turn": 0.5, "from_decode": 0.5, "on_decode": 0.5},
    "cuda": {"second_turn": 0.08, "from_decode": 0.35, "on_decode": 0.05},
    "cuda.auto": {"second_turn": 0.08, "from_decode": 0.15, "on_decode": 0.05},
}


@dataclass
class Runs:
    ttfts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in KINDS})
    """Seconds to the first token, by kind of turn."""
    bytes_over_missing: list[float] = field(default_factory=list)
    transport: str = ""
    """Of KV from the decode worker to the prefill worker."""


async def one_round(pair: Workers, turns: Turns, number: int, block_size: int, runs: Runs) -> None:
    def text(length: int, kind: int) -> list[int]:
        return prompt_of(length, 10 * number + kind)

    # Bytes of KV that came to the decode worker and are verified, since the start.
    received = partial(pair.decode.metric, "baton:kv_bytes_total", direction="receive")
    content = pb.ContentSource(**pair.decode.kv)
    history, start = text(turns.history, 0), await received()
    answer = (await pair.handover(request(history, turns.answer))).tokens
    second = [*history, *answer, *text(NEW_TOKENS, 1)]
    before = await received()
    runs.ttfts["second_turn"].append((await pair.handover(request(second, 2), content)).ttft)
    cached_tokens = (len(history) + len(answer) - 1) // block_size * block_size  # the last token has no KV
    sent_per_token = (before - start) / len(history)
    sent = await received() - before
    runs.bytes_over_missing.append(sent / sent_per_token / (len(second) - cached_tokens))

    history = text(turns.history, 2)
    _, answer = await pair.on_decode(request(history, turns.answer))
    work = request([*history, *answer, *text(NEW_TOKENS, 3)], 2)
    runs.ttfts["from_decode"].append((await pair.handover(work, content)).ttft)
    ttft, _ = await pair.on_decode(request([*history, *answer, *text(NEW_TOKENS, 4)], 2))
    runs.ttfts["on_decode"].append(ttft)

    runs.ttfts["computed"].append((await pair.handover(request(text(len(second), 5), 2))).ttft)


async def rounds(run: Run, cluster: LocalCluster, turns: Turns) -> Runs:
    runs = Runs()
    async with Workers(*cluster.drivers()) as pair:
        described = await pair.decode.stub.Describe(pb.DescribeRequest())
        for number in range(run.args.rounds + 1):  # the first one warms up: lanes, page faults
            await one_round(pair, turns, number, described.block_size, runs if number else Runs())
        status = await pair.decode.stub.GetStatus(pb.StatusRequest())
        runs.transport = next(iter(status.kv_transports.values()), "none: nothing was fetched")
    return runs


def measure(run: Run) -> None:
    turns = ON_CUDA if run.on_gpus else SHORT_ON_CPU if run.short else ON_CPU
    connector = run.args.kv_connector
    on_gpus = ("--max-model-len", "16384", "--advanced.kv-lanes", "8", "--advanced.kv-slots", "256")
    with two_workers(run, *(on_gpus if run.on_gpus else ()), "--kv-connector", connector) as cluster:
        runs = asyncio.run(rounds(run, cluster, turns))
    run.parameters |= turns._asdict() | {"transport": runs.transport}
    transport = run.device if connector == "tcp" else f"{run.device}.{connector}"
    name, ttfts = f"reuse.{transport}", runs.ttfts
    for kind, goal in GOALS.get(transport, GOALS[run.device]).items():
        run.add_ratio(
            f"{name}.{kind}", ttfts[kind], "ms", ttfts["computed"], "computing it all", scale=1e3,
            p99=percentile(ttfts[kind], 0.99) * 1e3, goal=goal,
        )  # fmt: skip
    run.add(Row(f"{name}.computed", median_ms(ttfts["computed"]), "ms"))
    worst = max(runs.bytes_over_missing)
    run.add(Row(f"{name}.bytes_over_missing", worst, "ratio", goal=1.02))


BENCH = Bench(
    "reuse",
    measure,
    __doc__,
    options=(
        Option("--rounds", default=9, short=MIN_PAIRS),
        Option("--kv-connector", default="tcp", choices=("auto", "tcp")),
        MODEL,
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
