"""How much of a KV transfer hides behind the prefill, and what the handover costs.

A prefill and a decode worker run as real processes, without Ray or a router; the bench submits to both as a
router does. Two kinds of run are interleaved, A B A B …:

A  both submitted at once: layers stream while later ones are computed.
   exposed  = decode has all KV injected − prefill sampled the first token
   handover = token 2 − token 1 at the router, in decode steps (the median gap of the tokens that follow)
B  decode submitted when prefill is done: the same bytes, with nothing to hide behind.
   alone    = FETCH → all KV injected

hidden = 1 − max(0, exposed) ÷ alone: 1 is a transfer nobody waited for, 0 one that began when prefill ended.
Tokens are timed where a router would see them; the moments inside the workers come from their traces, whose
clock (CLOCK_MONOTONIC) all processes of a host share. `alone` is also compared with plain sockets that carry
as many bytes, in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench.contract as contract
from bench.contract import EXIT_CANNOT_MEASURE, Report, Row
from bench.raw_sockets import RawPair
from bench.roles import Driver, Roles, request
from bench.shapes import write_shape
from rpc import worker_pb2 as pb

OUTPUT_TOKENS = 12
GPU_SHAPE = "llama-3.1-8b"


@dataclass
class Workers:
    prefill: Driver
    decode: Driver
    source: dict[str, Any]  # what the prefill worker reported

    async def submit_prefill(self, work: pb.Request) -> bytes:
        prefill_id = os.urandom(16)
        submit = pb.SubmitPrefill(prefill_id=prefill_id, request=work, handover=True)
        await self.prefill.send(pb.RouterMessage(prefill=submit))
        return prefill_id

    async def submit_decode(self, work: pb.Request, prefill_id: bytes) -> bytes:
        decode_id = os.urandom(16)
        source = pb.PrefillSource(
            prefill_id=prefill_id,
            kv_address=self.source["kv_address"],
            incarnation=int(self.source["incarnation"]),
        )
        submit = pb.SubmitDecode(decode_id=decode_id, request=work, source=source)
        await self.decode.send(pb.RouterMessage(decode=submit))
        return decode_id


@dataclass
class Streamed:
    """A run of kind A, times in seconds."""

    prefill_id: bytes
    decode_id: bytes
    ttft: float
    handover: float
    step: float


async def streamed(workers: Workers, prompt: list[int]) -> Streamed:
    work = request(prompt, OUTPUT_TOKENS)
    submitted = asyncio.get_running_loop().time()
    prefill_id = await workers.submit_prefill(work)
    decode_id = await workers.submit_decode(work, prefill_id)
    [(first, token)] = await workers.prefill.tokens(prefill_id, 1)
    output = await workers.decode.tokens(decode_id, OUTPUT_TOKENS)
    assert output[0][1].token_id == token.token_id, "decode must repeat prefill's first token"
    assert [event.output_index for _, event in output] == list(range(OUTPUT_TOKENS))
    at = [when for when, _ in output]
    step = statistics.median(b - a for a, b in itertools.pairwise(at[1:]))
    return Streamed(prefill_id, decode_id, first - submitted, at[1] - first, step)


async def alone(workers: Workers, prompt: list[int]) -> bytes:
    """A run of kind B. Returns its decode id."""
    work = request(prompt, 2)
    prefill_id = await workers.submit_prefill(work)
    await workers.prefill.tokens(prefill_id, 1)
    decode_id = await workers.submit_decode(work, prefill_id)
    await workers.decode.tokens(decode_id, 2)
    return decode_id


@dataclass
class Background:
    """Streams that keep the decode batch at a size while others are measured."""

    workers: Workers
    attempts: list[tuple[Driver, bytes]]

    @classmethod
    async def start(cls, workers: Workers, size: int, context: int, length: int) -> Background:
        attempts: list[tuple[Driver, bytes]] = []
        for number in range(size):
            work = request(prompt_of(context, 100_000 + number), length)
            prefill_id = await workers.submit_prefill(work)
            decode_id = await workers.submit_decode(work, prefill_id)
            attempts.append((workers.decode, decode_id))
        for driver, decode_id in attempts:
            await driver.tokens(decode_id, 2)
        return cls(workers, attempts)

    async def stop(self) -> None:
        for driver, decode_id in self.attempts:
            await driver.send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=decode_id)))


def prompt_of(length: int, number: int) -> list[int]:
    """Token ids that no other prompt shares a prefix with."""
    return [100 + (number * 7919 + i * 31) % 20_000 for i in range(length)]


def flags(args: argparse.Namespace, directory: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Flags of both roles; environment of prefill and of decode."""
    common = ["--dtype", args.dtype, "--kv-lanes", str(args.lanes), "--trace-dir", str(directory)]
    if args.device == "cpu":
        # One core each: on a small machine the two engines would otherwise fight over all of them.
        return [*common, "--num-threads", "1", *(["--model", args.model] if args.model else [])], {}, {}
    import torch

    model = args.model or str(write_shape(GPU_SHAPE, directory))
    longest = max(args.tokens, 1200) + 4096
    common += ["--device", "cuda", "--model", model, "--load-format", "dummy"]
    common += ["--max-model-len", str(longest), "--max-num-batched-tokens", "8192", "--max-num-seqs", "128"]
    common += ["--kv-slot-bytes", str(2 << 20), "--kv-slots", "256", "--engine-timeout", "120"]
    if torch.cuda.device_count() < 2:
        return [*common, "--gpu-memory-utilization", "0.4"], {}, {}
    return common, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}


async def measure(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        runs: dict[int, list[Streamed]] = {batch: [] for batch in [0, *args.batch]}
        alones: list[bytes] = []
        with Roles() as roles, closing(RawPair(args.lanes)) as raw:
            common, for_prefill, for_decode = flags(args, directory)
            source = roles.start("prefill", *common, environment=for_prefill)
            target = roles.start("decode", *common, environment=for_decode)
            drivers = [Driver(source["address"], roles.secret), Driver(target["address"], roles.secret)]
            for driver in drivers:
                await driver.attach()
            workers = Workers(drivers[0], drivers[1], source)
            await streamed(workers, prompt_of(args.tokens, 0))  # lanes, page faults, torch's first calls
            for number in range(1, args.rounds + 1):
                runs[0].append(await streamed(workers, prompt_of(args.tokens, 2 * number)))
                alones.append(await alone(workers, prompt_of(args.tokens, 2 * number + 1)))
            for batch in args.batch:
                background = await Background.start(workers, batch, context=1000, length=3000)
                for number in range(args.rounds):
                    prompt = prompt_of(args.tokens, 1000 * batch + number)
                    runs[batch].append(await streamed(workers, prompt))
                await background.stop()
            for driver in drivers:
                await driver.close()
            trace = Trace.read(directory)
            size = trace.joined[alones[0]].size
            raws = [raw.seconds(size) for _ in alones]
        # Complete once the workers are gone and have flushed their traces.
        trace = Trace.read(directory)
    report_rows(args, report, runs, [trace.joined[i].fetch_seconds for i in alones], raws, trace)


@dataclass(frozen=True)
class Joined:
    at: float
    size: int  # bytes of KV
    fetch_seconds: float


@dataclass
class Trace:
    """What the workers' traces say about attempts. Times in seconds of CLOCK_MONOTONIC."""

    first_token: dict[bytes, float]  # by prefill id
    joined: dict[bytes, Joined]  # by decode id

    @classmethod
    def read(cls, directory: Path) -> Trace:
        trace = cls({}, {})
        for path in directory.glob("*engine.trace"):
            for line in path.read_text().splitlines()[1:]:
                event = json.loads(line.rstrip(","))
                at, about = event.get("ts", 0.0) / 1e6, event["args"]
                if event["name"] == "first token":
                    trace.first_token[bytes.fromhex(about["prefill"])] = at
                elif event["name"] == "joined":
                    joined = Joined(at, about["bytes"], about["fetch_us"] / 1e6)
                    trace.joined[bytes.fromhex(about["decode"])] = joined
        return trace


def report_rows(
    args: argparse.Namespace,
    report: Report,
    runs: dict[int, list[Streamed]],
    alones: list[float],
    raws: list[float],
    trace: Trace,
) -> None:
    prefix = f"overlap.tcp.n{args.tokens}"
    exposed = [trace.joined[r.decode_id].at - trace.first_token[r.prefill_id] for r in runs[0]]
    hidden = [1 - max(0.0, e) / lone for e, lone in zip(exposed, alones, strict=True)]
    report.add(
        Row(
            f"{prefix}.hidden", statistics.median(hidden), "share", spread=max(hidden) - min(hidden),
            goal=0.8 if args.device == "cpu" else 0.9, better="higher",
        )
    )  # fmt: skip
    for batch, series in runs.items():
        steps = [run.handover / run.step for run in series]
        report.add(
            Row(
                f"{prefix}.handover" + (f".b{batch}" if batch else ""), statistics.median(steps), "steps",
                p99=contract.percentile(steps, 0.99), goal=2.5 if args.device == "cpu" else 2.0,
                better="lower",
            )
        )  # fmt: skip
        report.add(
            Row(f"{prefix}.step" + (f".b{batch}" if batch else ""), _median_ms(r.step for r in series), "ms")
        )
    ratio, spread = contract.paired_ratio(raws, alones)
    report.add(Row(f"{prefix}.exposed", _median_ms(exposed), "ms", p99=max(exposed) * 1e3))
    report.add(
        Row(
            f"{prefix}.alone", _median_ms(alones), "ms", ratio=ratio, spread=spread,
            ratio_to="raw sockets, same bytes and lanes (as speed)",
        )
    )  # fmt: skip
    report.add(Row(f"{prefix}.ttft", _median_ms(run.ttft for run in runs[0]), "ms"))


def _median_ms(seconds: Any) -> float:
    return statistics.median(seconds) * 1e3


def main() -> int:
    p = contract.parser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--tokens", type=int, help="prompt length (default: 1000 on a CPU, 2000 on a GPU)")
    p.add_argument("--rounds", type=int, default=9, help="rounds A B (default: %(default)s)")
    p.add_argument("--lanes", type=int, help="KV lanes (default: 4 on a CPU, 8 on a GPU)")
    p.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--model", help=f"default: the embedded model on a CPU, {GPU_SHAPE} (dummy) on a GPU")
    p.add_argument(
        "--batch", type=int, action="append", default=[], metavar="N",
        help="also measure the handover while N other streams decode; may be repeated",
    )  # fmt: skip
    args = p.parse_args()
    has_gpu = bool(contract.machine()["gpus"])
    if args.device == "cuda" and not has_gpu:
        print("bench.overlap --device cuda: no GPU here", file=sys.stderr)
        return EXIT_CANNOT_MEASURE
    args.device = args.device or ("cuda" if has_gpu else "cpu")
    on_cpu = args.device == "cpu"
    args.tokens = args.tokens or (1000 if on_cpu else 2000)
    args.lanes = args.lanes or (4 if on_cpu else 8)
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    if args.short:
        args.rounds = contract.MIN_PAIRS
    if args.rounds < contract.MIN_PAIRS:
        p.error(f"--rounds: at least {contract.MIN_PAIRS}")
    parameters = {k: v for k, v in vars(args).items() if k != "json"}
    report = Report("overlap", parameters | {"output_tokens": OUTPUT_TOKENS}, args.json)
    asyncio.run(measure(args, report))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
