"""First and second tokens where the link between two hosts carries half of the KV, beside one worker alone.

The hosts are network namespaces (needs root). A prefill and a decode worker have one each, and one worker
alone has the same prompts at the same times. Each worker has one core. A token of the model has 0.26 MB of
KV. In each round both sides are measured, one after the other: the bench takes some 2 × ROUNDS × SECONDS.
Some requests before show what the link carries.

`link.half.ttft`    time until the first token, mean and p99, over that of one worker
`link.half.second`  time until the second token, likewise
`link.half.gap`     from the first to the second token. A full queue makes it longer: a plan lets a second
                    token come late if the first one comes sooner by as much
`link.half.handed`  share of the requests whose KV went over the link
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.bench.lab.driver import EXIT_CANNOT_MEASURE, Bench, Option, Run
from baton.bench.lab.harness.cluster import LocalCluster, served, status
from baton.bench.lab.harness.hosts import Hosts, NoHosts
from baton.bench.lab.harness.streams import Case, Stream, new_session, read, with_ends
from baton.bench.report import Row
from baton.steps.quantiles import percentile
from baton.system import usable_cpus

SHAPE = "small-large-kv"
ANSWER, WARM_UP = 16, 6
MOST = 1.15
"""How many times later tokens may come than those of one worker (must)."""


@dataclass
class Side:
    cluster: LocalCluster
    streams: list[Stream] = field(default_factory=list)

    async def serve(self, starts: Sequence[float], prompts: Sequence[str]) -> list[Stream]:
        """`starts`: seconds from now. Raises RuntimeError if a request fails."""
        begin = time.monotonic()
        async with new_session() as http:

            async def one(start: float, prompt: str) -> Stream:
                await asyncio.sleep(max(0.0, begin + start - time.monotonic()))
                return await read(http, self.cluster.url, Case(prompt, ANSWER, 0.0, 0))

            return with_ends(await asyncio.gather(*map(one, starts, prompts)))

    def times(self) -> dict[str, list[float]]:
        """By the names of rows, of each request."""
        first, gaps = zip(*((stream.ttft, stream.gaps[0]) for stream in self.streams), strict=True)
        return {"ttft": [*first], "second": [*map(sum, zip(first, gaps, strict=True))], "gap": [*gaps]}


def starts_of(draw: random.Random, rate: float, seconds: float) -> list[float]:
    """When the requests of a round begin, at `rate` a second: one at least."""
    starts = [draw.uniform(0.0, min(seconds, 1 / rate))]
    while (now := starts[-1] + draw.expovariate(rate)) < seconds:
        starts.append(now)
    return starts


def prompts_of(draw: random.Random, count: int, tokens: int) -> list[str]:
    return [" ".join(f"w{draw.randrange(4000, 8000)}" for _ in range(tokens)) for _ in range(count)]


async def rounds(run: Run, apart: Side, alone: Side) -> None:
    args = run.args
    warm_up = [0.5 * number for number in range(WARM_UP)]
    for side in (apart, alone):
        await side.serve(warm_up, prompts_of(random.Random(0), WARM_UP, args.tokens))
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
    workers = status(apart.cluster.url)["workers"]
    handed = sum(worker["status"].get("handovers", 0) for worker in workers)
    run.add(Row("link.half.handed", handed / (len(apart.streams) + WARM_UP), ""))
    for worker in workers:
        for link in worker["status"]["kv_links"]:
            run.add(Row("link.half.carries", link["bytes_per_s"] / 1e6, "MB/s"))


def measure(run: Run) -> None:
    try:
        network = Hosts(2)
    except NoHosts as e:
        print(e, file=sys.stderr)
        sys.exit(EXIT_CANNOT_MEASURE)
    first, *others = range(usable_cpus())
    flags = ("--advanced.num-blocks", str(24 * (run.args.tokens + ANSWER) // 16), "--kv-connector", "tcp")
    with network:
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
            sides = Side(apart), Side(alone)
            asyncio.run(rounds(run, *sides))
            report(run, *sides)


BENCH = Bench(
    "link",
    measure,
    __doc__,
    options=(
        Option("--rate", "requests/s", 1.0),
        Option("--tokens", "of a prompt", 256),
        Option("--seconds", "of a round, in which its requests begin", 50.0, short=10.0),
        Option("--rounds", "", 4, short=1),
    ),
    devices=("cpu",),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
