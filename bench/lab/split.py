"""How much sooner the first token comes if a prefill and a decode worker compute a prompt together.

Both run as real processes. The bench submits plans as a router does, made by the router's policy from what
the workers report. Rounds of two prompts alternate, both of tokens that no prompt had before:

ttft     both workers compute the prompt, and the decode worker has the last range and goes on with it
alone    the decode worker computes all of it

`failed` counts prompts of which a part failed, or whose tokens differ from those of one worker. `waited` is
the share of `ttft` in which the step of the last range waited for KV. On CPUs each worker has one thread.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field

from baton.bench.lab.driver import MIN_PAIRS, gpus_or_exit, parser, report_of
from baton.bench.lab.harness.cluster import LocalCluster, two_workers
from baton.bench.lab.harness.workers import Driver, Workers, prompt_of, request
from baton.bench.lab.shapes import DENSE
from baton.bench.report import Row
from baton.router.policy.split import PromptCost, SplitWorker, first_speed, split
from baton.rpc import worker_pb2 as pb

ROUNDS = 7
TOKENS = {"cpu": (900,), "cuda": (2_000, 8_000, 30_000)}
GOALS = {2_000: 0.72, 8_000: 0.62, 30_000: 0.58, 128_000: 0.56}
"""Of `ttft`, over `alone`, on GPUs."""
ANSWER = 4


@dataclass
class Runs:
    ttft: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    failed: int = 0


class Pair(Workers):
    def waited(self) -> Awaitable[float]:
        """Seconds that steps of the decode worker waited for KV, since its start."""
        return self.decode.metric("baton:prompt_parts_wait_seconds_total")

    async def plan(self, tokens: int) -> list[tuple[Driver, int]]:
        """The worker of each range, and its end."""
        drivers, workers = (self.prefill, self.decode), list[SplitWorker]()
        for driver in drivers:
            described = await driver.stub.Describe(pb.DescribeRequest())
            status = await driver.stub.GetStatus(pb.StatusRequest())
            step, floor = described.max_num_batched_tokens, status.fastest_step_seconds
            speed = first_speed(status.prefill_tokens_per_s, status, described.attention_doubles_at)
            workers.append(SplitWorker(0.0, speed, step, floor))
        cost = PromptCost(tokens, 0, described.attention_doubles_at, layers=described.num_layers)
        shares = split(cost, dict(enumerate(workers)), last=1)
        if shares is None:
            raise RuntimeError(f"the policy does not split a prompt of {tokens} tokens at these speeds")
        return [(drivers[part.worker], part.stop) for part in shares.ranges]

    async def together(self, prompt: list[int], plan: list[tuple[Driver, int]]) -> tuple[float, list[int]]:
        """Returns the time to first token, and the answer. Raises RuntimeError if a part fails."""
        ids = {driver: os.urandom(16) for driver, _ in plan}
        starts = [0, *(stop for _, stop in plan)]
        ranges = [
            pb.PlanRange(prefill_id=ids[driver], start=start, stop=stop, **driver.kv)
            for start, (driver, stop) in zip(starts, plan, strict=False)
        ]
        began = time.perf_counter()
        for driver, prefill_id in ids.items():
            work = request(prompt[: max(stop for owner, stop in plan if owner is driver)], ANSWER)
            submit = pb.SubmitPrefill(prefill_id=prefill_id, request=work, handover=True, plan=ranges)
            await driver.send(pb.RouterMessage(prefill=submit))
        final = ids[self.decode]
        decode_id = await self.submit_decode(request(prompt, ANSWER), final, self.decode)
        [(first, _)] = await self.decode.tokens(final, 1)
        tokens = await self.decode.tokens(decode_id, ANSWER)
        return first - began, [event.token_id for _, event in tokens]


async def one_round(pair: Pair, tokens: int, number: int, runs: Runs) -> None:
    ttft, _ = await pair.on_decode(request(prompt_of(tokens, 3 * number), ANSWER))
    runs.alone.append(ttft)
    prompt, before = prompt_of(tokens, 3 * number + 1), await pair.waited()
    try:
        ttft, answer = await pair.together(prompt, await pair.plan(tokens))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        runs.failed += 1
        return
    runs.ttft.append(ttft)
    runs.waited.append((await pair.waited() - before) / ttft)
    work = request(prompt, ANSWER)
    work.cache_salt = b"computed again"
    _, computed = await pair.on_decode(work)
    runs.failed += computed != answer


async def measure(args: argparse.Namespace, cluster: LocalCluster) -> dict[int, Runs]:
    runs: dict[int, Runs] = {}
    async with Pair(*cluster.drivers()) as pair:
        for tokens in args.tokens:
            runs[tokens] = Runs()
            # The prefill worker must know its speed.
            warm = await pair.prefill.prefill(request(prompt_of(tokens, tokens - 1), 1))
            await pair.prefill.tokens(warm, 1)
            for number in range(args.rounds + 1):  # the first one warms up: lanes, speeds
                await one_round(pair, tokens, tokens + number, runs[tokens] if number else Runs())
    return runs


def main() -> int:
    p = parser(__doc__ or "")
    p.add_argument("--tokens", type=int, action="append", help=f"of a prompt (default: {TOKENS})")
    p.add_argument("--model", help=f"default: the embedded model on a CPU, {DENSE} (dummy) on a GPU")
    args = p.parse_args()
    args.tokens = args.tokens or TOKENS[args.device]
    args.rounds = MIN_PAIRS if args.short else ROUNDS
    if args.device == "cuda":
        gpus_or_exit(2, "a prompt that two workers share")
    with two_workers(args, (), ("--max-model-len", str(max(args.tokens) + 1024))) as cluster:
        results = asyncio.run(measure(args, cluster))
    report = report_of("split", args)
    for tokens, runs in results.items():
        name = "split.cpu" if args.device == "cpu" else f"split.{args.device}.n{tokens}"
        if runs.ttft:
            goal = None if args.device == "cpu" else GOALS.get(tokens)
            alone = runs.alone[: len(runs.ttft)]
            report.add_ratio(f"{name}.ttft", runs.ttft, "ms", alone, "one engine", scale=1e3, goal=goal)
            report.add(Row(f"{name}.alone", statistics.median(runs.alone) * 1e3, "ms"))
            report.add(Row(f"{name}.waited", statistics.median(runs.waited), "of the time to first token"))
        report.add(Row(f"{name}.failed", runs.failed, "prompts", goal=0))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
