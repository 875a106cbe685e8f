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

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import NamedTuple

import baton.bench.lab.driver as driver
from baton.bench.lab.driver import report_of
from baton.bench.lab.harness.cluster import LocalCluster, two_workers
from baton.bench.lab.harness.workers import Workers, prompt_of, request
from baton.bench.lab.shapes import DENSE
from baton.bench.report import Report, Row
from baton.rpc import worker_pb2 as pb
from baton.steps.quantiles import percentile

ROUNDS = 9
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


class Pair(Workers):
    def received(self) -> Awaitable[float]:
        """Bytes of KV that came to the decode worker and are verified, since the start."""
        return self.decode.metric("baton:kv_bytes_total", 'direction="receive"')

    async def handover(
        self, prompt: list[int], length: int, content: pb.ContentSource | None = None
    ) -> tuple[float, list[int]]:
        """Prefill on one worker, decode on the other. Returns the time to first token, and the answer."""
        work = request(prompt, length)
        began = time.perf_counter()
        prefill_id = await self.prefill.prefill(work, handover=True, content=content)
        decode_id = await self.submit_decode(work, prefill_id)
        [(first, _)] = await self.prefill.tokens(prefill_id, 1)
        tokens = await self.decode.tokens(decode_id, length)
        return first - began, [event.token_id for _, event in tokens]


@dataclass
class Runs:
    ttfts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in KINDS})
    """Seconds to the first token, by kind of turn."""
    bytes_over_missing: list[float] = field(default_factory=list)
    transport: str = ""
    """Of KV from the decode worker to the prefill worker."""


async def one_round(pair: Pair, turns: Turns, number: int, block_size: int, runs: Runs) -> None:
    def text(length: int, kind: int) -> list[int]:
        return prompt_of(length, 10 * number + kind)

    content = pb.ContentSource(**pair.decode.kv)
    history, start = text(turns.history, 0), await pair.received()
    _, answer = await pair.handover(history, turns.answer)
    second = [*history, *answer, *text(NEW_TOKENS, 1)]
    before = await pair.received()
    ttft, _ = await pair.handover(second, 2, content)
    runs.ttfts["second_turn"].append(ttft)
    cached_tokens = (len(history) + len(answer) - 1) // block_size * block_size  # the last token has no KV
    sent_per_token = (before - start) / len(history)
    sent = await pair.received() - before
    runs.bytes_over_missing.append(sent / sent_per_token / (len(second) - cached_tokens))

    history = text(turns.history, 2)
    _, answer = await pair.on_decode(request(history, turns.answer))
    ttft, _ = await pair.handover([*history, *answer, *text(NEW_TOKENS, 3)], 2, content)
    runs.ttfts["from_decode"].append(ttft)
    ttft, _ = await pair.on_decode(request([*history, *answer, *text(NEW_TOKENS, 4)], 2))
    runs.ttfts["on_decode"].append(ttft)

    ttft, _ = await pair.handover(text(len(second), 5), 2)
    runs.ttfts["computed"].append(ttft)


async def measure(args: argparse.Namespace, cluster: LocalCluster, turns: Turns) -> Runs:
    runs = Runs()
    async with Pair(*cluster.drivers()) as pair:
        described = await pair.decode.stub.Describe(pb.DescribeRequest())
        for number in range(args.rounds + 1):  # the first one warms up: lanes, page faults
            await one_round(pair, turns, number, described.block_size, runs if number else Runs())
        status = await pair.decode.stub.GetStatus(pb.StatusRequest())
        runs.transport = next(iter(status.kv_transports.values()), "none: nothing was fetched")
    return runs


def report_rows(report: Report, name: str, goals: dict[str, float], runs: Runs) -> None:
    """`name` begins the names of all rows."""
    ttfts = runs.ttfts
    for kind, goal in goals.items():
        report.add_ratio(
            f"{name}.{kind}", ttfts[kind], "ms", ttfts["computed"], "computing it all", scale=1e3,
            p99=percentile(ttfts[kind], 0.99) * 1e3, goal=goal,
        )  # fmt: skip
    report.add(Row(f"{name}.computed", statistics.median(ttfts["computed"]) * 1e3, "ms"))
    worst = max(runs.bytes_over_missing)
    report.add(Row(f"{name}.bytes_over_missing", worst, "ratio", goal=1.02))


def main() -> int:
    p = driver.parser(__doc__ or "")
    p.add_argument("--model", help=f"default: the embedded model on a CPU, {DENSE} (dummy) on a GPU")
    p.add_argument("--kv-connector", choices=["auto", "tcp"], default="tcp", help="default: %(default)s")
    args = p.parse_args()
    turns = ON_CUDA if args.device == "cuda" else SHORT_ON_CPU if args.short else ON_CPU
    args.rounds = driver.MIN_PAIRS if args.short else ROUNDS
    on_gpus = ("--max-model-len", "16384", "--advanced.kv-lanes", "8", "--advanced.kv-slots", "256")
    with two_workers(args, ("--kv-connector", args.kv_connector), on_gpus) as cluster:
        runs = asyncio.run(measure(args, cluster, turns))
    report = report_of("reuse", args, **turns._asdict(), transport=runs.transport)
    name = args.device if args.kv_connector == "tcp" else f"{args.device}.{args.kv_connector}"
    report_rows(report, f"reuse.{name}", GOALS.get(name, GOALS[args.device]), runs)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
