"""First and second tokens where the link between two hosts carries half of the KV, beside one worker alone.

The hosts are network namespaces (needs root). A prefill and a decode worker have one each, and one worker
alone has the same prompts at the same times. Each worker has one core. A token of the model has 0.26 MB of
KV. In each round both sides are measured, one after the other: the bench takes some 2 × ROUNDS × SECONDS.
Some requests before, all at once so that both workers have some, show what the link carries.

`link.half.ttft`    time until the first token, mean and p99, over that of one worker
`link.half.second`  time until the second token, likewise
`link.half.gap`     from the first to the second token. A full queue makes it longer: a plan lets a second
                    token come late if the first one comes sooner by as much
`link.half.handed`  share of the requests whose KV went over the link

With `--gbps`, as on a GPU, both workers alone serve at each of these rates of the link, one after the other:

`link.R.rate`       bytes/s that the prefill worker reports, over the rate R in Gbit/s. 0: no limit
`link.R.ttft`       time until the first token, median and p99
`link.R.gap`        from the first to the second token, likewise: a handover's own wait shows only there
`link.R.handed`     as above. Two workers on one GPU slow each other down, so these are no times of two GPUs
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.bench.lab.driver import LOGS, Bench, Option, Run
from baton.bench.lab.harness.cluster import LocalCluster, served, status
from baton.bench.lab.harness.hosts import Hosts
from baton.bench.lab.harness.streams import Case, Stream, new_session, read, with_ends
from baton.bench.lab.shapes import DENSE
from baton.bench.report import Row
from baton.steps.quantiles import percentile
from baton.system import usable_cpus

SHAPE = "small-large-kv"
WARM_UP = 6
"""Requests. A link is known once KV came on it, and a worker that is free computes a prompt for itself."""
MOST = 1.15
"""How many times later tokens may come than those of one worker (must)."""


@dataclass
class Side:
    cluster: LocalCluster
    answer: int
    streams: list[Stream] = field(default_factory=list)

    async def serve(self, starts: Sequence[float], prompts: Sequence[str]) -> list[Stream]:
        """`starts`: seconds from now. Raises RuntimeError if a request fails."""
        begin = time.monotonic()
        async with new_session() as http:

            async def one(start: float, prompt: str) -> Stream:
                await asyncio.sleep(max(0.0, begin + start - time.monotonic()))
                return await read(http, self.cluster.url, Case(prompt, self.answer, 0.0, 0))

            return with_ends(await asyncio.gather(*map(one, starts, prompts)))

    def times(self) -> dict[str, list[float]]:
        """By the names of rows, of each request."""
        first, gaps = zip(*((stream.ttft, stream.gaps[0]) for stream in self.streams), strict=True)
        return {"ttft": [*first], "second": [*map(sum, zip(first, gaps, strict=True))], "gap": [*gaps]}

    def handed(self) -> int:
        """Handovers so far."""
        return sum(worker["status"].get("handovers", 0) for worker in status(self.cluster.url)["workers"])

    def links(self) -> list[float]:
        """Bytes/s of each link, as workers report them."""
        workers = status(self.cluster.url)["workers"]
        return [link["bytes_per_s"] for worker in workers for link in worker["status"]["kv_links"]]


def starts_of(draw: random.Random, rate: float, seconds: float) -> list[float]:
    """When the requests of a round begin, at `rate` a second: one at least."""
    starts = [draw.uniform(0.0, min(seconds, 1 / rate))]
    while (now := starts[-1] + draw.expovariate(rate)) < seconds:
        starts.append(now)
    return starts


def prompts_of(draw: random.Random, count: int, tokens: int) -> list[str]:
    return [" ".join(f"w{draw.randrange(4000, 8000)}" for _ in range(tokens)) for _ in range(count)]


async def warm_up(side: Side, draw: random.Random, tokens: int) -> None:
    await side.serve([0.0] * WARM_UP, prompts_of(draw, WARM_UP, tokens))


def kv_blocks(args: argparse.Namespace) -> tuple[str, str]:
    """The flag that gives a worker on a CPU room for 24 requests."""
    return "--advanced.num-blocks", str(24 * (args.tokens + args.answer) // 16)


async def rounds(run: Run, apart: Side, alone: Side) -> None:
    args = run.args
    for side in (apart, alone):
        await warm_up(side, random.Random(0), args.tokens)
    for number in range(args.rounds):
        draw = random.Random(number + 1)
        starts = starts_of(draw, args.rate, args.seconds)
        prompts = prompts_of(draw, len(starts), args.tokens)
        for side in (apart, alone) if number % 2 else (alone, apart):
            side.streams += await side.serve(starts, prompts)


def report(run: Run, apart: Side, alone: Side) -> None:
    bases = alone.times()
    for name, ours in apart.times().items():
        base, goal = bases[name], None if name == "gap" else MOST
        for part, of in (("mean", statistics.mean), ("p99", lambda x: percentile(x, 0.99))):
            row = f"link.half.{name}.{part}"
            run.add_ratio(row, [of(ours)], "ms", [of(base)], "one worker", scale=1e3, goal=goal)
            run.add(Row(f"{row}.alone", of(base) * 1e3, "ms"))
    run.add(Row("link.half.handed", apart.handed() / (len(apart.streams) + WARM_UP), ""))
    for rate in apart.links():
        run.add(Row("link.half.carries", rate / 1e6, "MB/s"))


async def round_of(run: Run, side: Side, number: int) -> None:
    """The side serves other prompts in each round. First come some that show what the link carries."""
    args, draw = run.args, random.Random(number)
    await warm_up(side, draw, args.tokens)
    starts = starts_of(draw, args.rate, args.seconds)
    side.streams = await side.serve(starts, prompts_of(draw, len(starts), args.tokens))


def table(run: Run, network: Hosts) -> None:
    """Both workers at each rate of the link between them."""
    memory = ("--gpu-memory-utilization", "0.45")
    shape = DENSE if run.on_gpus else SHAPE
    flags = () if run.on_gpus else kv_blocks(run.args)
    with served(
        run, "--kv-connector", "tcp", *flags, shape=shape, on_gpus=memory, hosts=network.hosts
    ) as cluster:
        side = Side(cluster, run.args.answer)
        for number, gbps in enumerate(map(float, run.args.gbps.split(","))):
            shaped, row, before = 1e9 / 8 * gbps, f"link.{gbps:g}", side.handed()
            network.hosts[0].limit(sends=shaped)
            asyncio.run(round_of(run, side, number))
            for rate in side.links():
                ratio, to = (rate / shaped, "the limit") if shaped else (None, None)
                run.add(Row(f"{row}.rate", rate / 1e6, "MB/s", ratio=ratio, ratio_to=to))
            times = side.times()
            for name in ("ttft", "gap"):
                run.add_median(f"{row}.{name}", times[name], "ms", scale=1e3)
            run.add(Row(f"{row}.handed", (side.handed() - before) / (len(side.streams) + WARM_UP), ""))


def half(run: Run, network: Hosts) -> None:
    """Both workers beside one alone, with a link that carries half of the KV."""
    first, *others = range(usable_cpus())
    flags = *kv_blocks(run.args), "--kv-connector", "tcp"
    cores = [{first}, {others[-1] if others else first}]
    with (
        served(run, *flags, shape=SHAPE, name="apart", hosts=network.hosts, cpus=cores) as apart,
        served(
            run, *flags, shape=SHAPE, name="alone", prefill=0, hosts=network.hosts[1:], cpus=cores[1:],
            router_flags=["--advanced.decode-only"],
        ) as alone,
    ):  # fmt: skip
        token = status(apart.url)["workers"][0]["description"]["kv_token_bytes"]
        bytes_per_s = run.args.rate * run.args.tokens * token / 2
        network.hosts[0].limit(sends=bytes_per_s)
        run.parameters["link_bytes_per_s"] = round(bytes_per_s)
        sides = Side(apart, run.args.answer), Side(alone, run.args.answer)
        asyncio.run(rounds(run, *sides))
        report(run, *sides)


def measure(run: Run) -> None:
    with Hosts(2) as network:
        (table if run.args.gbps else half)(run, network)


def check(args: argparse.Namespace) -> None:
    for rate in args.gbps.split(",") if args.gbps else ():
        if not 0 <= float(rate) < math.inf:
            raise ValueError(f"--gbps {args.gbps}: rates in Gbit/s, separated by commas, such as 10,25,0")


BENCH = Bench(
    "link",
    measure,
    __doc__,
    options=(
        Option("--gbps", "rates of the link in Gbit/s, with commas; 0: no limit", {"cuda": "10,25,100,0"}),
        Option("--rate", "requests/s", {"cpu": 1.0, "cuda": 3.0}),
        Option("--tokens", "of a prompt", {"cpu": 256, "cuda": 2000}),
        Option("--answer", "tokens of an answer", {"cpu": 16, "cuda": 150}),
        Option(
            "--seconds", "of a round, in which its requests begin", {"cpu": 50.0, "cuda": 15.0}, short=10.0
        ),
        Option("--rounds", "", 4, short=1),
        LOGS,
    ),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
