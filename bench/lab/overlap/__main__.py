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

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import baton.bench.lab.driver as driver
from baton.bench.lab.driver import gpus_or_exit, report_of
from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.workers import Workers, prompt_of
from baton.bench.lab.kv.raw_sockets import RawPair
from baton.bench.lab.overlap.streams import (
    AT_ONCE,
    OUTPUT_TOKENS,
    Background,
    Streamed,
    Trace,
    alone,
    injected_gaps,
    prefill_only,
    quiet_gaps,
    streamed,
)
from baton.bench.lab.shapes import DENSE, SHAPES, write_shape
from baton.bench.report import Report, Row
from baton.steps.quantiles import percentile

CONTEXT = 1000
"""Prompt tokens of the background streams."""
PERIOD_S = 0.8
"""Seconds of a period in which gaps are collected, with or without incoming KV."""
PERIODS = 6
"""Periods of each kind."""
ROUNDS = 9
REST_S = 0.05
LONG_OUTPUT = 100
"""Output tokens of a request of --long."""
LONG_REQUESTS = 2
GOLDEN = 0.618  # the fractional parts of its multiples are spread evenly


def background_tokens(tokens: int) -> int:
    """Output tokens of a background stream. They must come for longer than the prompts are measured."""
    return max(3000, tokens // 4)


def flags(args: argparse.Namespace, directory: Path) -> list[str]:
    """The flags of both roles."""
    common = [
        "--dtype", "float32" if args.device == "cpu" else "bfloat16", "--advanced.kv-lanes", str(args.lanes),
        "--kv-connector", args.kv_connector, "--advanced.trace-dir", str(directory),
        "--no-enable-prefix-caching",  # batches repeat prompts, which must be computed again
    ]  # fmt: skip
    if args.elastic_memory is not None:
        common.append("--advanced.elastic-memory" if args.elastic_memory else "--advanced.no-elastic-memory")
    if args.device == "cpu":
        # One thread each: otherwise two engines would compete for the cores of a small machine.
        return [*common, "--advanced.num-threads", "1", *(["--model", args.model] if args.model else [])]
    model = args.model or str(write_shape(args.model_shape, directory))
    prompts = (*args.tokens, *args.long)
    longest = max(CONTEXT + background_tokens(max(args.tokens)), *(length + 1024 for length in prompts))
    common += ["--model", model, "--load-format", "dummy"]
    common += ["--max-model-len", str(longest), "--max-num-batched-tokens", "8192", "--max-num-seqs", "128"]
    common += ["--advanced.kv-slots", "256", "--failure-timeout", "120"]
    return common


def groups(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The flags of the prefill and of the decode worker: their ranks, and where they run. With too few GPUs
    the workers share them. Exits if there are too few for one worker."""
    ranks = args.prefill_ranks, args.decode_ranks
    dtypes = args.prefill_kv_cache_dtype, args.decode_kv_cache_dtype
    prefill, decode = (
        ["--tensor-parallel-size", str(size), "--kv-cache-dtype", dtype]
        for size, dtype in zip(ranks, dtypes, strict=True)
    )
    if args.device == "cpu":
        return prefill, decode
    gpus = gpus_or_exit(max(ranks), "--prefill-ranks {} --decode-ranks {}:".format(*ranks))
    if sum(ranks) > gpus:
        print("the workers share GPUs: steps beside a prefill take longer than with GPUs of their own")
        for flags in (prefill, decode):
            flags += ["--gpu-memory-utilization", "0.4"]
    return [*prefill, "--device", "cuda:0"], [*decode, "--device", f"cuda:{gpus - ranks[1]}"]


@dataclass
class Runs:
    """What was measured with prompts of one length. Times are in seconds."""

    streamed: dict[int, list[Streamed]]  # by size of the batch beside it
    alones: list[bytes] = field(default_factory=list)  # decode ids
    prefills: list[float] = field(default_factory=list)  # times to first token without a handover
    gaps: dict[int, list[tuple[list[float], list[float]]]] = field(default_factory=dict)
    """By batch: quiet and injected, next to each other."""
    raws: list[float] = field(default_factory=list)


async def measure(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prefill, decode = groups(args)
        workers = LocalCluster(
            directory, prefill=1, decode=1, router=False, worker_flags=flags(args, directory),
            prefill_flags=prefill, decode_flags=decode,
        )  # fmt: skip
        with workers as cluster, closing(RawPair(args.lanes)) as raw:
            measured, long = await _measure_all(args, cluster)
            for runs in measured.values():
                size = Trace.read(*directory.glob("*.trace")).joined[runs.alones[0]].size
                runs.raws = [raw.seconds(size) for _ in runs.alones]
        # Complete after the workers have ended, which flushes their traces.
        trace = Trace.read(*directory.glob("*.trace"))
    for tokens, runs in measured.items():
        report_rows(args, report, tokens, runs, trace)
    report_long(args, report, long, trace)


async def _measure_all(
    args: argparse.Namespace, cluster: LocalCluster
) -> tuple[dict[int, Runs], dict[int, list[Streamed]]]:
    """What was measured, by tokens of a prompt, and by those of a request of --long."""
    async with Workers(*cluster.drivers()) as workers:
        measured = {tokens: await _measure(args, workers, tokens) for tokens in args.tokens}
        long: dict[int, list[Streamed]] = {}
        for length in args.long:
            prompts = [prompt_of(length, 90_000 + n) for n in range(LONG_REQUESTS)]
            long[length] = [await streamed(workers, prompt, LONG_OUTPUT) for prompt in prompts]
    return measured, long


async def _measure(args: argparse.Namespace, workers: Workers, tokens: int) -> Runs:
    runs = Runs({batch: [] for batch in [0, *args.batch]})
    for number in range(2):  # warm up: lanes, page faults, first calls of torch
        await streamed(workers, prompt_of(tokens, number))
    for number in range(2, args.rounds + 2):
        await asyncio.sleep(REST_S)
        runs.streamed[0].append(await streamed(workers, prompt_of(tokens, 3 * number)))
        await asyncio.sleep(REST_S)
        runs.alones.append(await alone(workers, prompt_of(tokens, 3 * number + 1)))
        await asyncio.sleep(REST_S)
        runs.prefills.append(await prefill_only(workers, prompt_of(tokens, 3 * number + 2)))
    for batch in args.batch:
        background = await Background.start(workers, batch, CONTEXT, background_tokens(tokens), seed=100_000)
        for number in range(3 * args.rounds):
            # The last run ended with a step. So begin at points that are spread evenly over a step.
            step = runs.streamed[batch][-1].step if number else 0.0
            await asyncio.sleep(REST_S + step * (number * GOLDEN % 1))
            prompt = prompt_of(tokens, 1000 * batch + number)
            runs.streamed[batch].append(await streamed(workers, prompt))
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


def _transport(args: argparse.Namespace) -> str:
    sizes = args.prefill_ranks, args.decode_ranks
    transport = f"overlap.{args.kv_connector}"
    transport += "" if sizes == (1, 1) else ".{}to{}".format(*sizes)
    dtypes = args.prefill_kv_cache_dtype, args.decode_kv_cache_dtype
    transport += "" if dtypes == ("auto", "auto") else ".{}to{}".format(*dtypes)
    transport += "" if args.model_shape == DENSE else f".{args.model_shape}"
    return transport + {None: "", True: ".elastic", False: ".fixed"}[args.elastic_memory]


def report_rows(args: argparse.Namespace, report: Report, tokens: int, runs: Runs, trace: Trace) -> None:
    on_cpu, prefix = args.device == "cpu", f"{_transport(args)}.n{tokens}"
    idle = runs.streamed[0]
    alones = [trace.joined[i].fetch_seconds for i in runs.alones]
    exposed = [trace.joined[r.decode_id].at - trace.first_token[r.prefill_id] for r in idle]
    hidden = [1 - max(0.0, e) / lone for e, lone in zip(exposed, alones, strict=True)]
    name, spread = f"{prefix}.hidden", max(hidden) - min(hidden)
    goal = 0.8 if on_cpu else 0.9
    report.add(Row(name, statistics.median(hidden), "share", spread=spread, goal=goal, better="higher"))
    for batch, series in runs.streamed.items():
        steps = [run.handover / run.step for run in series]
        suffix = f".b{batch}" if batch else ""
        report.add_median(f"{prefix}.handover{suffix}", steps, "steps", goal=2.5 if on_cpu else 2.0)
        report.add(Row(f"{prefix}.step{suffix}", driver.median_ms(r.step for r in series), "ms"))
    report.add_ratio(
        f"{prefix}.ttft", [run.ttft for run in idle], "ms", runs.prefills,
        "the same prefill without a handover", scale=1e3, goal=1.05,
    )  # fmt: skip
    for batch, pairs in runs.gaps.items():
        for name, q, goal in (("ttit_p99", 0.99, 1.05), ("ttit", 0.5, None)):
            quiet, during = ([percentile(gaps, q) for gaps in kind] for kind in zip(*pairs, strict=True))
            to = "while no KV is injected"
            report.add_ratio(f"{prefix}.{name}.b{batch}", during, "ms", quiet, to, scale=1e3, goal=goal)
    per_token = trace.joined[runs.alones[0]].size / tokens
    report.add(Row(f"{prefix}.wire", per_token, "bytes a token"))
    report.add_median(f"{prefix}.exposed", exposed, "ms", scale=1e3)
    to = "raw sockets, same bytes and lanes (as speed)"
    report.add_ratio(f"{prefix}.alone", alones, "ms", runs.raws, to, scale=1e3, inverse=True)


def report_long(
    args: argparse.Namespace, report: Report, long: dict[int, list[Streamed]], trace: Trace
) -> None:
    transport = _transport(args)
    for length, requests in long.items():
        name = f"{transport}.long.n{length}"
        report.add(Row(f"{name}.ttft", driver.median_ms(run.ttft for run in requests), "ms"))
        report.add(Row(f"{name}.whole", driver.median_ms(run.whole for run in requests), "ms"))
        report.add(Row(f"{name}.step", driver.median_ms(run.step for run in requests), "ms"))
        handovers = [run.handover / run.step for run in requests]
        report.add(Row(f"{name}.handover", statistics.median(handovers), "steps"))
        report.add(Row(f"{name}.bytes", trace.joined[requests[0].decode_id].size / 1e6, "MB"))


def main() -> int:
    p = driver.parser(__doc__ or "")
    p.add_argument(
        "--tokens", type=int, action="append", metavar="N",
        help="prompt length (default: 1000 on a CPU, 2000 on a GPU); may be repeated",
    )  # fmt: skip
    p.add_argument("--lanes", type=int, help="KV lanes (default: 4 on a CPU, 8 on a GPU)")
    p.add_argument(
        "--kv-connector",
        choices=("tcp", "auto"),
        default="tcp",
        help="of both workers (default: %(default)s)",
    )
    for side in ("prefill", "decode"):
        p.add_argument(
            f"--{side}-ranks", type=int, default=1, metavar="N",
            help=f"GPUs of the {side} worker, or its processes on a CPU (default: %(default)s)",
        )  # fmt: skip
        p.add_argument(
            f"--{side}-kv-cache-dtype", choices=("auto", "fp8"), default="auto",
            help=f"of the {side} worker (default: %(default)s)",
        )  # fmt: skip
    p.add_argument(
        "--elastic-memory", action=argparse.BooleanOptionalAction,
        help="of both workers, which have states or windows (default: that of the workers)",
    )  # fmt: skip
    p.add_argument("--model", help="default: the embedded model on a CPU, --model-shape (dummy) on a GPU")
    p.add_argument("--model-shape", choices=SHAPES, default=DENSE, help="on a GPU (default: %(default)s)")
    p.add_argument(
        "--batch", type=int, action="append", default=[], metavar="N",
        help="also measure the handover while N other streams decode; may be repeated",
    )  # fmt: skip
    p.add_argument(
        "--long", type=int, action="append", default=[], metavar="N",
        help=f"also time whole requests of N tokens, with {LONG_OUTPUT} output tokens; may be repeated",
    )  # fmt: skip
    args = p.parse_args()
    on_cpu = args.device == "cpu"
    args.tokens = args.tokens or [1000 if on_cpu else 2000]
    args.lanes = args.lanes or (4 if on_cpu else 8)
    args.rounds = driver.MIN_PAIRS if args.short else ROUNDS
    if min(args.batch, default=AT_ONCE + 1) <= AT_ONCE:
        p.error(f"--batch: more than {AT_ONCE}, which are handed over at a time")
    if on_cpu and args.model_shape != DENSE:
        p.error("--model-shape: with --device cuda")
    report = report_of("overlap", args, output_tokens=OUTPUT_TOKENS)
    gc.disable()  # a collection over all received tokens takes 0.1 s and would delay timestamps
    asyncio.run(measure(args, report))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
