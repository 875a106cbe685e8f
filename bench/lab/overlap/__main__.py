"""How much of a KV transfer hides behind the prefill, and what the handover costs.

A prefill and a decode worker run as real processes, without Ray or a router. The bench submits to both as a
router does. Three kinds of run alternate, A B C A B C …:

A  both are submitted at once: layers are sent while later ones are computed.
   exposed  = time from the first token at prefill to all KV injected at decode
   handover = time from token 1 to token 2 at the router, in decode steps (the median gap of the later tokens)
B  decode is submitted when the prefill is done: the same bytes, with no computation to hide behind.
   alone    = time from FETCH to all KV injected
C  the same prefill without a handover: its time to first token when no KV is sent.

Before each run the GPUs rest for the same time, since earlier work decides their clocks.

hidden = 1 − max(0, exposed) ÷ alone. It is 1 if no request waited for the transfer, and 0 if the transfer
began when the prefill ended. Token times are those at the router. Times inside the workers come from their
traces, whose clock (CLOCK_MONOTONIC) all processes of a host share. `alone` is also compared with plain
sockets that move as many bytes.

--batch N compares the gaps of N other streams while KV comes in all the time and while none comes, in the
order A B B A …, since contexts grow. Two more streams decode in B, so that the batch has the same size.

--long N times requests of N tokens from their arrival to their last token, one after another.

--prefill-ranks and --decode-ranks spread the two workers over several GPUs each. Then names of rows say so:
`overlap.tcp.2to1.n2000.hidden` is from two ranks to one. With too few GPUs the workers share them. On a CPU
the embedded model has 1 or 3.
So do --prefill-kv-cache-dtype and --decode-kv-cache-dtype: `overlap.tcp.autotofp8.n2000.hidden`.
With --kv-connector auto KV goes from GPU to GPU, or through shared memory: `overlap.auto.n2000.hidden`.
With --model-shape bamba-9b states go with the KV: `overlap.tcp.bamba-9b.n2000.hidden`. They are 123 MB of
each request, whatever its length, and leave while the last chunk of the prompt is computed.
With --elastic-memory both workers move memory between KV and states, or layers with windows, and with
--no-elastic-memory neither: `overlap.tcp.bamba-9b.elastic.n2000.hidden`, or `.fixed` in place of `.elastic`.
"""

import asyncio
import gc
import statistics
import sys
from argparse import BooleanOptionalAction, Namespace
from contextlib import closing
from dataclasses import dataclass, field

from baton.bench.lab.driver import MIN_PAIRS, Bench, Option, Run, gpus_or_exit, median_ms
from baton.bench.lab.harness.cluster import MODEL, LocalCluster, served
from baton.bench.lab.harness.workers import Handover, Workers, prompt_of, request
from baton.bench.lab.kv.raw_sockets import RawPair
from baton.bench.lab.overlap.streams import AT_ONCE, Background, Trace, injected_gaps, quiet_gaps
from baton.bench.lab.shapes import DENSE, SHAPES
from baton.bench.report import Row
from baton.steps.quantiles import percentile

OUTPUT_TOKENS = 12
CONTEXT = 1000
"""Prompt tokens of the background streams."""
PERIOD_S = 0.8
"""Seconds of a period in which gaps are collected, with or without incoming KV."""
PERIODS = 6
"""Periods of each kind."""
REST_S = 0.05
LONG_OUTPUT = 100
"""Output tokens of a request of --long."""
LONG_REQUESTS = 2
GOLDEN = 0.618  # the fractional parts of its multiples are spread evenly


def background_tokens(tokens: int) -> int:
    """Output tokens of a background stream. They must come for longer than the prompts are measured."""
    return max(3000, tokens // 4)


def flags(args: Namespace) -> list[str]:
    """The flags of both roles."""
    common = [
        "--advanced.kv-lanes", str(args.lanes), "--kv-connector", args.kv_connector,
        "--no-enable-prefix-caching",  # batches repeat prompts, which must be computed again
    ]  # fmt: skip
    if args.elastic_memory is not None:
        common.append("--advanced.elastic-memory" if args.elastic_memory else "--advanced.no-elastic-memory")
    return common


def on_gpus(args: Namespace) -> list[str]:
    """Further flags there."""
    prompts = (*args.tokens, *args.long)
    longest = max(CONTEXT + background_tokens(max(args.tokens)), *(length + 1024 for length in prompts))
    return [
        "--dtype", "bfloat16", "--load-format", "dummy", "--max-model-len", str(longest),
        "--max-num-batched-tokens", "8192", "--max-num-seqs", "128",
        "--advanced.kv-slots", "256", "--failure-timeout", "120",
    ]  # fmt: skip


def groups(args: Namespace) -> tuple[list[str], list[str]]:
    """The flags of the prefill and of the decode worker."""
    prefill, decode = (
        ["--tensor-parallel-size", str(size), "--kv-cache-dtype", dtype]
        for size, dtype in (
            (args.prefill_ranks, args.prefill_kv_cache_dtype), (args.decode_ranks, args.decode_kv_cache_dtype)
        )
    )  # fmt: skip
    return prefill, decode


def devices(args: Namespace) -> tuple[list[str], list[str]]:
    """The first GPU of each worker, and further flags of both. With too few GPUs the workers share them.
    Exits if there are too few for one worker."""
    ranks = args.prefill_ranks, args.decode_ranks
    gpus = gpus_or_exit(max(ranks), "--prefill-ranks {} --decode-ranks {}:".format(*ranks))
    share = []
    if sum(ranks) > gpus:
        print("the workers share GPUs: steps beside a prefill take longer than with GPUs of their own")
        share = ["--gpu-memory-utilization", "0.4"]
    return ["cuda:0", f"cuda:{gpus - ranks[1]}"], share


@dataclass
class Runs:
    """What was measured with prompts of one length. Times are in seconds."""

    streamed: dict[int, list[Handover]]  # by size of the batch beside it
    alones: list[bytes] = field(default_factory=list)  # decode ids
    prefills: list[float] = field(default_factory=list)  # times to first token without a handover
    gaps: dict[int, list[tuple[list[float], list[float]]]] = field(default_factory=dict)
    """By batch: quiet and injected, next to each other."""
    raws: list[float] = field(default_factory=list)


def measure(run: Run) -> None:
    gc.disable()  # a collection over all received tokens takes 0.1 s and would delay timestamps
    args, traces = run.args, run.directory / "traces"
    run.parameters["output_tokens"] = OUTPUT_TOKENS
    prefill, decode = groups(args)
    shape = args.model_shape if run.on_gpus and not args.model else ""
    first_gpus, share = devices(args) if run.on_gpus else ([], [])
    with (
        served(
            run, *flags(args), "--advanced.trace-dir", str(traces), model=args.model or "", shape=shape,
            router=False, on_gpus=[*on_gpus(args), *share], prefill_flags=prefill, decode_flags=decode,
            devices=first_gpus,
        ) as cluster,
        closing(RawPair(args.lanes)) as raw,
    ):  # fmt: skip
        measured, long = asyncio.run(_measure_all(args, cluster))
        for runs in measured.values():
            size = Trace.read(*traces.glob("*.trace")).joined[runs.alones[0]].size
            runs.raws = [raw.seconds(size) for _ in runs.alones]
    # Complete after the workers have ended, which flushes their traces.
    trace = Trace.read(*traces.glob("*.trace"))
    for tokens, runs in measured.items():
        report_rows(run, tokens, runs, trace)
    report_long(run, long, trace)


async def _measure_all(
    args: Namespace, cluster: LocalCluster
) -> tuple[dict[int, Runs], dict[int, list[Handover]]]:
    """What was measured, by tokens of a prompt, and by those of a request of --long."""
    async with Workers(*cluster.drivers()) as workers:
        measured = {tokens: await _measure(args, workers, tokens) for tokens in args.tokens}
        long: dict[int, list[Handover]] = {}
        for length in args.long:
            prompts = [prompt_of(length, 90_000 + n) for n in range(LONG_REQUESTS)]
            long[length] = [await workers.handover(request(prompt, LONG_OUTPUT)) for prompt in prompts]
    return measured, long


async def _measure(args: Namespace, workers: Workers, tokens: int) -> Runs:
    runs = Runs({batch: [] for batch in [0, *args.batch]})
    for number in range(2):  # warm up: lanes, page faults, first calls of torch
        await workers.handover(request(prompt_of(tokens, number), OUTPUT_TOKENS))
    for number in range(2, args.rounds + 2):
        await asyncio.sleep(REST_S)
        runs.streamed[0].append(await workers.handover(request(prompt_of(tokens, 3 * number), OUTPUT_TOKENS)))
        await asyncio.sleep(REST_S)
        handed = await workers.handover(request(prompt_of(tokens, 3 * number + 1), 2), late=True)
        runs.alones.append(handed.decode_id)
        await asyncio.sleep(REST_S)
        runs.prefills.append(await workers.prefill.first_token(request(prompt_of(tokens, 3 * number + 2), 1)))
    for batch in args.batch:
        background = await Background.start(workers, batch, CONTEXT, background_tokens(tokens), seed=100_000)
        for number in range(3 * args.rounds):
            # The last run ended with a step. So begin at points that are spread evenly over a step.
            step = runs.streamed[batch][-1].step if number else 0.0
            await asyncio.sleep(REST_S + step * (number * GOLDEN % 1))
            prompt = prompt_of(tokens, 1000 * batch + number)
            runs.streamed[batch].append(await workers.handover(request(prompt, OUTPUT_TOKENS)))
        await background.stop(AT_ONCE)
        runs.gaps[batch] = [await _gaps(background, tokens, n) for n in range(PERIODS)]
        await background.stop()
    return runs


async def _gaps(background: Background, tokens: int, number: int) -> tuple[list[float], list[float]]:
    seed = 200_000 + 1000 * number
    if number % 2:
        injected = await injected_gaps(background, tokens, PERIOD_S, seed)
        return await quiet_gaps(background, CONTEXT, PERIOD_S, seed + 500), injected
    quiet = await quiet_gaps(background, CONTEXT, PERIOD_S, seed + 500)
    return quiet, await injected_gaps(background, tokens, PERIOD_S, seed)


def transport_label(args: Namespace) -> str:
    sizes = args.prefill_ranks, args.decode_ranks
    transport = f"overlap.{args.kv_connector}"
    transport += "" if sizes == (1, 1) else ".{}to{}".format(*sizes)
    dtypes = args.prefill_kv_cache_dtype, args.decode_kv_cache_dtype
    transport += "" if dtypes == ("auto", "auto") else ".{}to{}".format(*dtypes)
    transport += "" if args.model_shape == DENSE else f".{args.model_shape}"
    return transport + {None: "", True: ".elastic", False: ".fixed"}[args.elastic_memory]


def report_rows(run: Run, tokens: int, runs: Runs, trace: Trace) -> None:
    on_cpu, prefix = not run.on_gpus, f"{transport_label(run.args)}.n{tokens}"
    idle = runs.streamed[0]
    alones = [trace.joined[i].fetch_seconds for i in runs.alones]
    exposed = [trace.joined[r.decode_id].at - trace.first_token[r.prefill_id] for r in idle]
    hidden = [1 - max(0.0, e) / lone for e, lone in zip(exposed, alones, strict=True)]
    name, spread = f"{prefix}.hidden", max(hidden) - min(hidden)
    goal = 0.8 if on_cpu else 0.9
    run.add(Row(name, statistics.median(hidden), "share", spread=spread, goal=goal, better="higher"))
    for batch, series in runs.streamed.items():
        steps = [each.gap / each.step for each in series]
        suffix = f".b{batch}" if batch else ""
        run.add_median(f"{prefix}.handover{suffix}", steps, "steps", goal=2.5 if on_cpu else 2.0)
        run.add(Row(f"{prefix}.step{suffix}", median_ms(r.step for r in series), "ms"))
    run.add_ratio(
        f"{prefix}.ttft", [each.ttft for each in idle], "ms", runs.prefills,
        "the same prefill without a handover", scale=1e3, goal=1.05,
    )  # fmt: skip
    for batch, pairs in runs.gaps.items():
        for name, q, goal in (("ttit_p99", 0.99, 1.05), ("ttit", 0.5, None)):
            quiet, during = ([percentile(gaps, q) for gaps in kind] for kind in zip(*pairs, strict=True))
            to = "while no KV is injected"
            run.add_ratio(f"{prefix}.{name}.b{batch}", during, "ms", quiet, to, scale=1e3, goal=goal)
    per_token = trace.joined[runs.alones[0]].size / tokens
    run.add(Row(f"{prefix}.wire", per_token, "bytes a token"))
    run.add_median(f"{prefix}.exposed", exposed, "ms", scale=1e3)
    to = "raw sockets, same bytes and lanes (as speed)"
    run.add_ratio(f"{prefix}.alone", alones, "ms", runs.raws, to, scale=1e3, inverse=True)


def report_long(run: Run, long: dict[int, list[Handover]], trace: Trace) -> None:
    transport = transport_label(run.args)
    for length, requests in long.items():
        name = f"{transport}.long.n{length}"
        run.add(Row(f"{name}.ttft", median_ms(each.ttft for each in requests), "ms"))
        run.add(Row(f"{name}.whole", median_ms(each.whole for each in requests), "ms"))
        run.add(Row(f"{name}.step", median_ms(each.step for each in requests), "ms"))
        handovers = [each.gap / each.step for each in requests]
        run.add(Row(f"{name}.handover", statistics.median(handovers), "steps"))
        run.add(Row(f"{name}.bytes", trace.joined[requests[0].decode_id].size / 1e6, "MB"))


def check(args: Namespace) -> None:
    if min(args.batch, default=AT_ONCE + 1) <= AT_ONCE:
        raise ValueError(f"--batch: more than {AT_ONCE}, which are handed over at a time")
    if args.device == "cpu" and args.model_shape != DENSE:
        raise ValueError("--model-shape: with --device cuda")


def of_side(side: str) -> tuple[Option, ...]:
    ranks = f"GPUs of the {side} worker, or its processes on a CPU"
    return (
        Option(f"--{side}-ranks", ranks, 1),
        Option(f"--{side}-kv-cache-dtype", f"of the {side} worker", "auto", choices=("auto", "fp8")),
    )


LONG = f"also time whole requests of N tokens, with {LONG_OUTPUT} output tokens; may be repeated"
BENCH = Bench(
    "overlap",
    measure,
    __doc__,
    options=(
        Option("--tokens", "prompt length; may be repeated", {"cpu": [1000], "cuda": [2000]}),
        Option("--lanes", "KV lanes", {"cpu": 4, "cuda": 8}),
        Option("--rounds", "", 9, short=MIN_PAIRS),
        Option("--kv-connector", "of both workers", "tcp", choices=("tcp", "auto")),
        *of_side("prefill"),
        *of_side("decode"),
        Option("--elastic-memory", "of workers with states or windows", action=BooleanOptionalAction),
        MODEL,
        Option("--model-shape", "on a GPU", DENSE, choices=SHAPES, metavar="NAME"),
        Option("--batch", "also measure the handover while N other streams decode; may be repeated", []),
        Option("--long", LONG, []),
    ),
    check=check,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
