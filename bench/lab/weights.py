"""What do new weights cost the streams of a cluster, and are answers of them right?

A prefill and a decode worker serve the embedded model in float32 as real processes. Streams run while the
weights change, again and again: two layers have each other's MLP, and then their own. After each change all
prompts are sent again.

    different    tokens, of answers that begin after a change, which differ from those of a cluster that
                 started with the same weights, and has no prefix cache
    failed       answers that ended too soon, or with an error
    gap          the longest gap of a stream since a change began; …_kept: in a pause that keeps its KV
    pause        how long no worker served
    read         how long a worker read and checked weights, beside its steps

With `--trainer` a trainer in another process gives the weights (`bench.trainer`), on CPUs or GPUs.
"""

import asyncio
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import baton.bench.lab.trainer as trainer
from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.harness.changes import beside, tell
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, served
from baton.bench.lab.harness.streams import Case, Stream, Verdict, answers, cases, expected, judge
from baton.cluster.model import embedded_path
from baton.engine.gguf_header import GGUFHeader
from baton.rpc.pause import workers_at
from baton.rpc.weights import Replaced, named, replace_weights

ANSWER, LONG_ANSWER = 64, 256
"""Tokens of an answer after a change, and of one that runs while weights change."""
ON_CPU = ("--dtype", "float32", "--advanced.num-blocks", "1200")
NAMED = ("--served-model-name", "embedded")
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


async def change(cluster: LocalCluster, path: Path, version: str, *, keeps_kv: bool) -> Replaced:
    addresses = [worker.lives[-1]["address"] for worker in cluster.workers]
    weights, secret = named(str(path), version), cluster.secret.encode()
    if not keeps_kv:
        return await replace_weights(addresses, weights, secret, None)
    async with workers_at(addresses, secret, None) as workers:
        await workers.pause("keep", 600, keep_kv=True)
        done = await replace_weights(addresses, weights, secret, None)
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
            making = partial(change, cluster, path, f"bench-{number}", keeps_kv=keeps_kv)
            done, streams, gap = await beside(cluster.url, requests, LONG_ANSWER, making)
            self.replaced.append(done)
            self.running += streams
            self.gaps[keeps_kv].append(gap)
            later = await answers(cluster.url, requests, len(requests))
            self.verdicts.append(judge(later, expected_answers))


def measure(run: Run) -> None:
    if run.args.trainer or run.on_gpus:
        trainer.measure(run)
        return
    requests = cases(run.args.streams, ANSWER)
    serving = partial(served, run, *NAMED, router_flags=NAMED, on_cpu=ON_CPU)
    before, after = embedded_path(), changed(embedded_path(), run.directory / "after.gguf")
    right: list[tuple[Path, dict[Case, list[int]]]] = []
    for path in (after, before):
        with serving("--no-enable-prefix-caching", model=str(path), name=path.stem) as cluster:
            right.append((path, asyncio.run(expected(cluster.url, requests))))
    assert right[0][1] != right[1][1], "the weights differ"
    with serving(model=str(before), name="changes") as cluster:
        changes = Changes()
        asyncio.run(changes.make(cluster, right, run.args.changes))
        leaks = leaks_when_idle(cluster.url)
    run.detail = {"leaks": leaks}
    tell(run, "weights.cpu", changes.running, changes.verdicts, leaks)
    for name, gaps in (("gap", changes.gaps[False]), ("gap_kept", changes.gaps[True])):
        if gaps:
            run.add_median(f"weights.cpu.{name}", gaps, "s")
    run.add_median("weights.cpu.pause", [each.pause for each in changes.replaced], "s")
    run.add_median("weights.cpu.read", [each.read_seconds for each in changes.replaced], "s")


def check(args: Namespace) -> None:
    if args.kind and args.kind not in trainer.KINDS[args.device]:
        raise ValueError(f"--kind {args.kind}: needs --device cuda")


BENCH = Bench(
    "weights",
    measure,
    __doc__,
    options=(
        Option("--trainer", "a trainer gives the weights (always on a GPU)", False),
        Option("--kind", "with --trainer on a GPU (default: both)", choices=trainer.KINDS["cuda"]),
        Option("--changes", "of which half keep KV", 6, short=2),
        Option("--streams", default=8, short=4),
        Option("--tokens", "of the answers after each change, with --trainer", 50_000, short=512),
    ),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
