"""What do new weights cost the streams of a cluster, and are answers of them right?

A prefill and a decode worker serve the embedded model in float32 as real processes. Streams run while the
weights change, again and again: two layers have each other's MLP, and then their own. After each change all
prompts are sent again.

    different    tokens, of answers that begin after a change, which differ from those of a cluster that
                 started with the same weights, and has no prefix cache
    failed       answers that ended too soon, or with an error
    gap          the longest gap of a running stream around a change; …_kept: in a pause that keeps its KV
    pause        how long no worker served
    read         how long a worker read and checked weights, beside its steps

With `--trainer` a trainer in another process gives the weights (`bench.trainer`), on CPUs or GPUs.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import baton.bench.lab.driver as driver
import baton.bench.lab.trainer as trainer
from baton.bench.lab.driver import report_of
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.lab.harness.streams import (
    Case,
    Stream,
    Verdict,
    cases,
    expected,
    judge,
    new_session,
    read,
    until,
)
from baton.bench.report import Report, Row
from baton.cluster.model import embedded_path
from baton.engine.gguf_header import GGUFHeader
from baton.rpc.pause import workers_at
from baton.rpc.weights import Replaced, named, replace_weights

STREAMS, SHORT_STREAMS = 8, 4
CHANGES, SHORT_CHANGES = 6, 2
"""Half of them keep KV."""
ANSWER, LONG_ANSWER = 64, 256
"""Tokens of an answer after a change, and of one that runs while weights change."""
TOKENS, SHORT_TOKENS = 50_000, 512
"""Of the answers after each change, with `--trainer`."""
BEGUN = 4
"""Tokens that each stream has when weights change."""
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--advanced.num-threads",
    "1",
    "--advanced.num-blocks",
    "1200",
)
SWAPPED = "blk.0.ffn_up.weight", "blk.1.ffn_up.weight"


def changed(source: Path, target: Path) -> Path:
    """Writes the model with other weights: two tensors of one shape have each other's values."""
    shutil.copyfile(source, target)
    header = GGUFHeader(source)
    start = header.end + -header.end % header.metadata.get("general.alignment", 32)
    offsets = sorted(offset for *_, offset in header.tensors.values())
    (one, other) = (start + header.tensors[name][2] for name in SWAPPED)
    after = offsets.index(one - start) + 1
    size = offsets[after] + start - one
    assert header.tensors[SWAPPED[0]][:2] == header.tensors[SWAPPED[1]][:2], "they have one form"
    with target.open("r+b") as file:
        for to, begin in ((one, other), (other, one)):
            file.seek(to)
            file.write(header.data[begin : begin + size])
    return target


@contextmanager
def started(directory: Path, model: Path, *flags: str) -> Iterator[LocalCluster]:
    directory.mkdir()
    name = ("--model", str(model), "--served-model-name", "embedded")
    with LocalCluster(
        directory, prefill=1, decode=1, worker_flags=(*FLAGS, *name, *flags), router_flags=name
    ) as cluster:
        yield cluster


async def change(
    cluster: LocalCluster, path: Path, version: str, *, keeps_kv: bool
) -> tuple[Replaced, float]:
    """Also returns the time.monotonic() at which all workers had the weights, and no token of them."""
    addresses = [worker.lives[-1]["address"] for worker in cluster.workers]
    weights, secret = named(str(path), version), cluster.secret.encode()
    if not keeps_kv:
        return await replace_weights(addresses, weights, secret, None), time.monotonic()
    async with workers_at(addresses, secret, None) as workers:
        await workers.pause("keep", 600, keep_kv=True)
        done = await replace_weights(addresses, weights, secret, None), time.monotonic()
        await workers.resume()
    return done


class Changes:
    """Of one cluster."""

    def __init__(self) -> None:
        self.running: list[Stream] = []
        self.gaps: dict[bool, list[float]] = {False: [], True: []}
        """By whether KV was kept: the longest, of each change."""
        self.replaced: list[Replaced] = []
        self.verdicts: list[Verdict] = []
        """Of the answers after each change."""

    async def make(
        self, cluster: LocalCluster, right: Sequence[tuple[Path, dict[Case, list[int]]]], changes: int
    ) -> None:
        """`right`: the answers that each of two checkpoints gives."""
        requests = list(right[0][1])
        for number in range(changes):
            path, expected_answers = right[number % 2]
            keeps_kv = number % 4 >= 2 if changes > 2 else number % 2 == 1
            streams = [Stream(replace(case, max_tokens=LONG_ANSWER)) for case in requests]
            async with new_session() as http:
                reading = [asyncio.create_task(read(http, cluster.url, s.case, into=s)) for s in streams]

                def begun(streams: Sequence[Stream] = streams) -> bool:
                    assert not any(stream.error or stream.cut for stream in streams), "before the change"
                    return all(len(stream.token_ids) >= BEGUN for stream in streams)

                await until(begun, reading)
                done, moment = await change(cluster, path, f"bench-{number}", keeps_kv=keeps_kv)
                self.replaced.append(done)
                await asyncio.gather(*reading)
                later = await asyncio.gather(*(read(http, cluster.url, case) for case in requests))
            self.running += streams
            self.gaps[keeps_kv].append(max(stream.gap_around(moment) or 0.0 for stream in streams))
            self.verdicts.append(judge(later, expected_answers))


def measure(args: argparse.Namespace, report: Report) -> None:
    requests = cases(args.streams, ANSWER)
    with tempfile.TemporaryDirectory(prefix="baton-weights-") as name:
        directory = Path(name)
        before, after = embedded_path(), changed(embedded_path(), directory / "after.gguf")
        right: list[tuple[Path, dict[Case, list[int]]]] = []
        for path in (after, before):
            with started(directory / path.stem, path, "--no-enable-prefix-caching") as cluster:
                right.append((path, asyncio.run(expected(cluster.url, requests))))
        assert right[0][1] != right[1][1], "the weights differ"
        with started(directory / "changes", before) as cluster:
            changes = Changes()
            asyncio.run(changes.make(cluster, right, args.changes))
            leaks = leaks_when_idle(cluster.url)
    report.detail = {"leaks": leaks}
    failed = sum(stream.failed or len(stream.token_ids) != LONG_ANSWER for stream in changes.running)
    failed += sum(each.failed for each in changes.verdicts)
    different = sum(each.different + each.lost_or_repeated for each in changes.verdicts)
    report.add(Row("weights.cpu.different", different, "tokens", goal=0))
    report.add(Row("weights.cpu.failed", failed, "answers", goal=0))
    report.add(Row("weights.cpu.leaked", sum(leaks.values()), "blocks, slots, attempts", goal=0))
    for name, gaps in (("gap", changes.gaps[False]), ("gap_kept", changes.gaps[True])):
        if gaps:
            report.add_median(f"weights.cpu.{name}", gaps, "s")
    report.add_median("weights.cpu.pause", [each.pause for each in changes.replaced], "s")
    report.add_median("weights.cpu.read", [each.read_seconds for each in changes.replaced], "s")


def main() -> int:
    p = driver.parser(__doc__ or "")
    p.add_argument("--trainer", action="store_true", help="a trainer gives the weights (always on a GPU)")
    p.add_argument("--kind", choices=trainer.KINDS["cuda"], help="with --trainer on a GPU (default: both)")
    counts = {
        "changes": (CHANGES, SHORT_CHANGES),
        "streams": (STREAMS, SHORT_STREAMS),
        "tokens": (TOKENS, SHORT_TOKENS),
    }
    args = driver.with_counts(p, **counts)
    if args.kind and args.kind not in trainer.KINDS[args.device]:
        p.error(f"--kind {args.kind}: needs --device cuda")
    report = report_of("weights", args)
    if args.trainer or args.device == "cuda":
        trainer.measure(args, report)
    else:
        measure(args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
