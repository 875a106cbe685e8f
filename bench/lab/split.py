"""How much sooner the first token comes if a prefill and a decode worker compute a prompt together.

Both run as real processes. The bench submits plans as a router does, made by the router's policy from what
the workers report. Rounds of two prompts alternate, both of tokens that no prompt had before:

ttft     both workers compute the prompt, and the decode worker has the last range and goes on with it
alone    the decode worker computes all of it

`failed` counts prompts of which a part failed, or whose tokens differ from those of one worker. `waited` is
the share of `ttft` in which the step of the last range waited for KV. On CPUs each worker has one thread.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field

from baton.bench.lab.driver import MIN_PAIRS, Bench, Option, Run, gpus_or_exit, median_ms
from baton.bench.lab.harness.cluster import MODEL, LocalCluster, two_workers
from baton.bench.lab.harness.workers import Driver, Workers, prompt_of, request
from baton.bench.report import Row
from baton.router.policy.split import PromptCost, SplitWorker, first_speed, split
from baton.rpc import worker_pb2 as pb

TOKENS = {"cpu": [900], "cuda": [2_000, 8_000, 30_000]}
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
        shares = split(cost, [(0, workers[0])], last=(1, workers[1]))
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


async def rounds(run: Run, cluster: LocalCluster, tokens: int) -> Runs:
    runs = Runs()
    async with Pair(*cluster.drivers()) as pair:
        # The prefill worker must know its speed.
        await pair.prefill.first_token(request(prompt_of(tokens, tokens - 1), 1))
        for number in range(run.args.rounds + 1):  # the first one warms up: lanes, speeds
            await one_round(pair, tokens, tokens + number, runs if number else Runs())
    return runs


def measure(run: Run) -> None:
    if run.on_gpus:
        gpus_or_exit(2, "a prompt that two workers share")
    with two_workers(run, "--max-model-len", str(max(run.args.tokens) + 1024)) as cluster:
        for tokens in run.args.tokens:
            runs = asyncio.run(rounds(run, cluster, tokens))
            name = f"split.cuda.n{tokens}" if run.on_gpus else "split.cpu"
            if runs.ttft:
                alone, goal = runs.alone[: len(runs.ttft)], GOALS.get(tokens) if run.on_gpus else None
                run.add_ratio(f"{name}.ttft", runs.ttft, "ms", alone, "one engine", scale=1e3, goal=goal)
                run.add(Row(f"{name}.alone", median_ms(runs.alone), "ms"))
                waited = statistics.median(runs.waited)
                run.add(Row(f"{name}.waited", waited, "of the time to first token"))
            run.add(Row(f"{name}.failed", runs.failed, "prompts", goal=0))


BENCH = Bench(
    "split",
    measure,
    __doc__,
    options=(
        Option("--tokens", "of a prompt", TOKENS),
        Option("--rounds", default=7, short=MIN_PAIRS),
        MODEL,
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
