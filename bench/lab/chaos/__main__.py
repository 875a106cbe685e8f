"""Kills, stops, cuts off and flips the workers of a real cluster under load: `python -m baton.bench.chaos`.

The cluster has two workers of each role and a router. On a CPU it serves the embedded model in float32, or in
bfloat16 with `--batch-invariant`. On GPUs it serves the 8B Llama shape in bfloat16. The workers take the GPUs
in turn, or share the only one, and preempt requests, since their KV pools are small. Clients send one request
after another, greedy or seeded. Every answer must equal what the cluster answers without faults when it has
only this request. Processes of every kind are killed (SIGKILL), engines are stopped (SIGSTOP), lanes are cut,
workers are moved to the other pool and back. A client asks again if its router is killed. At the end every
pool must be whole.

With `--rate` requests begin at random times, and with `--seconds` faults come over so long. Then the longest
pause says what users notice:

    python -m baton.bench.chaos --rate 1 --seconds 60 --kills 3 --routers 0 --stalls 0 --breaks 0 --flips 0
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from baton.bench.lab.chaos.faults import draw, torment
from baton.bench.lab.driver import parser, report_of
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.lab.harness.streams import Case, Happened, Load, Stream, cases, expected, judge
from baton.bench.lab.harness.workers import metric
from baton.bench.lab.shapes import DENSE, SHAPES, write_shape
from baton.bench.load.target.tokenization import WORDS, Composer, Segment, Tokenization
from baton.bench.report import Report, Row
from baton.cluster.gpus import visible_gpus

WORKERS = ("prefill", "decode")
ROLES = (*WORKERS, "router")
ON_CPU = (
    "--device", "cpu", "--advanced.num-threads", "1", "--advanced.num-blocks", "600",
    "--max-num-batched-tokens", "64", "--failure-timeout", "2",
)  # fmt: skip
# A step of workers that share a GPU may take long, so deadlines are the usual ones.
ON_CUDA = "--max-num-seqs", "32", "--max-num-batched-tokens", "2048"
BLOCKS, BLOCKS_AT_RATE = 96, 480
"""On GPUs. With the first workers preempt requests, which makes pauses without a fault."""
MAX_WAIT = "600"
LONGEST_PAUSE = 0.5
"""Seconds of any stream at a rate on GPUs, where another worker takes over."""
COUNTS = {
    "kills": (12, 3, 2, "kills of each role"),
    "stalls": (2, 0, 0, "stopped engines of each role"),
    "routers": (3, 0, 1, "kills of the router"),
    "breaks": (6, 2, 1, "times that lanes are cut"),
    "flips": (6, 2, 2, "flips of workers of each role"),
}
"""How often each fault happens: usually, with --short, and with --short on GPUs."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = parser("Kill, stall and cut off the processes of a real cluster under load.")
    for name, (usual, short, on_gpus, meaning) in COUNTS.items():
        help_text = f"{meaning} (default: {usual}; {short} with --short, on GPUs {on_gpus})"
        p.add_argument(f"--{name}", type=int, metavar="N", help=help_text)
    p.add_argument("--clients", type=int, metavar="N", help="streams at a time (default: 8; 48 on GPUs)")
    p.add_argument("--rate", type=float, default=0.0, metavar="R", help="requests/s, in place of clients")
    p.add_argument("--seconds", type=float, default=0.0, metavar="S", help="spread faults over this time")
    p.add_argument("--tokens", type=int, default=0, metavar="N", help="go on until clients have N tokens")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of cases, moments and victims")
    p.add_argument("--model-shape", choices=SHAPES, metavar="NAME", help=f"random weights (on GPUs: {DENSE})")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the workers (on GPUs: bfloat16)")
    p.add_argument("--batch-invariant", action="store_true", help="give the workers this flag, in bfloat16")
    for flag, value in (("quantization", "NAME"), ("speculative-config", "JSON")):
        p.add_argument(f"--{flag}", metavar=value, help="give the workers this flag")
    p.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    args = p.parse_args(argv)
    on_gpus = args.device == "cuda"
    for name, (usual, *short, _) in COUNTS.items():
        if getattr(args, name) is None:
            setattr(args, name, short[on_gpus] if args.short else usual)
    args.clients = args.clients or (48 if on_gpus else 8)
    args.model_shape = args.model_shape or (DENSE if on_gpus else None)
    args.dtype = args.dtype or ("bfloat16" if on_gpus or args.batch_invariant else "float32")
    return args


async def measure(args: argparse.Namespace, cluster: LocalCluster) -> Report:
    rng, on_gpus = random.Random(args.seed), args.device == "cuda"
    requests = cases_for(args)
    right = await expected(cluster.url, requests, at_once=1)
    load = Load(cluster.url, requests, rng)
    quiet = (0.2, 1.5) if args.short else (0.2, 4.0)
    faults_of = {role: draw(role, args.kills, args.stalls, args.breaks, args.flips, rng) for role in WORKERS}
    faults_of["router"] = draw("router", args.routers, 0, 0, 0, rng)
    # So that all tracks end at about the same time.
    longer = quiet[0], quiet[1] * args.kills / max(1, args.routers)
    pauses = {role: longer if role == "router" else quiet for role in faults_of}
    if args.seconds:
        pauses = {role: (0.0, 2 * args.seconds / (len(faults) + 1)) for role, faults in faults_of.items()}
    tracks = (torment(cluster, role, faults, pauses[role], rng) for role, faults in faults_of.items())
    began = time.monotonic()
    async with load.at(args.rate) if args.rate else load.of(args.clients):
        happened = [one for track in await asyncio.gather(*tracks) for one in track]
        routers = [one for one in happened if one.role == "router"]
        await asyncio.sleep(began + args.seconds - time.monotonic())
        while (verdict := judge(load.streams, right, routers)).tokens < args.tokens and not verdict.failed:  # noqa: ASYNC110
            await asyncio.sleep(1)
    verdict = judge(load.streams, right, routers)
    leaks = await asyncio.to_thread(leaks_when_idle, cluster.url)
    report = report_of("chaos", args)
    verdict.add_to(report, "chaos", leaks)
    report.add(Row("chaos.reconnected", verdict.reconnected, "connections"))
    report.add(Row("chaos.tokens", verdict.tokens, "tokens"))
    preempted = sum(worker.metric("vllm:num_preemptions_total") for worker in cluster.workers)
    report.add(Row("chaos.preempted", preempted, "times, in the last lives"))
    report.add(Row("chaos.overflowed", metric(cluster.url, "baton:overflow_total"), "requests, likewise"))
    _add_faults(report, happened, load.streams, LONGEST_PAUSE if args.rate and on_gpus else None)
    return report


def _add_faults(
    report: Report, happened: list[Happened], streams: list[Stream], longest: float | None
) -> None:
    """Rows with the number of faults, the time that a worker was away, and the pauses that clients saw.
    `longest`: the goal of these. None: there is none."""
    counts = Counter(f"{one.role}.{one.fault}" for one in happened)
    for name, count in sorted(counts.items()):
        report.add(Row(f"chaos.{name}", count, "times"))
    for role in ROLES:
        away = [x.back - x.at for x in happened if x.role == role and x.back > x.at]
        _add_seconds(report, f"away.{role}", away)
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    for one in happened:
        gaps = (stream.gap_around(one.at) for stream in streams)
        pauses[f"{one.role}.{one.fault}"] += [gap for gap in gaps if gap is not None]
    _add_seconds(report, "pause", everywhere := [gap for gaps in pauses.values() for gap in gaps])
    report.add(Row("chaos.pause.max", max(everywhere, default=0.0), "s", goal=longest))
    for name, gaps in sorted(pauses.items()):
        _add_seconds(report, f"pause.{name}", gaps)
    report.detail = {"pauses": {name: sorted(round(gap, 3) for gap in gaps) for name, gaps in pauses.items()}}


def _add_seconds(report: Report, name: str, seconds: list[float]) -> None:
    if seconds:
        report.add_median(f"chaos.{name}", seconds, "s")


def cases_for(args: argparse.Namespace) -> list[Case]:
    """Every second one is greedy. The prompts for a shape have different lengths, and pairs begin alike."""
    if args.model_shape is None:
        return cases(6 if args.short else 16, 24, repeat=4)
    compose = Composer(Tokenization(WORDS, 1.0, 0, "one token a word")).compose
    lengths = enumerate(range(200, 1850, 66 if args.short else 33))
    prompts = [compose([Segment((i // 2,), n // 2), Segment((0, i), n - n // 2)]) for i, n in lengths]
    return [Case(prompt, 150, 0.8 * (i % 2), seed=i + 1) for i, prompt in enumerate(prompts)]


def start(args: argparse.Namespace, directory: Path) -> LocalCluster:
    """`directory`: for the files of the model, and without --logs for all others."""
    on_gpus, shape, gpus = args.device == "cuda", args.model_shape, len(visible_gpus())
    model = ["--model", str(write_shape(shape, directory, tokenizer=True))] if shape else []
    flags = [*(ON_CUDA if on_gpus else ON_CPU), *model, "--dtype", args.dtype]
    flags += ["--advanced.num-blocks", str(BLOCKS_AT_RATE if args.rate else BLOCKS)] if on_gpus else []
    flags += ["--load-format", "dummy", "--max-model-len", "2048"] if shape else []
    # The embedded model is a GGUF file, which workers would else serve packed.
    flags += ["--quantization", args.quantization or ("auto" if shape else "none")]
    flags += ["--batch-invariant"] if args.batch_invariant else []
    flags += ["--speculative-config", args.speculative_config] if args.speculative_config else []
    devices = [f"cuda:{i % gpus}" for i in range(2 * len(WORKERS))] if on_gpus else []
    # A rate may be too high while a worker is away. Then requests wait; a refusal would count as a failure.
    router = [*model, "--max-wait", MAX_WAIT] if args.rate else model
    return LocalCluster(args.logs or directory, worker_flags=flags, router_flags=router, devices=devices)


def main(argv: list[str] | None = None) -> Report:
    args = arguments(argv)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="baton-chaos-") as temporary,
        start(args, Path(temporary)) as cluster,
    ):
        report = asyncio.run(measure(args, cluster))
    report.finish()
    return report


if __name__ == "__main__":
    main()
