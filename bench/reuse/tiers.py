"""What the host tier gains and costs: `python -m baton.bench.reuse --tiers`; with `--disk DIR`, the disk.

host_tier   time to first token of a prompt that the pool evicted and the tier has, to computing it
step        time of a decode step beside copies to the tier, to one without

The system keeps in memory what was written to a disk not long ago, so reads may be faster than the disk.

A real worker with a small pool gets new prompts and old ones in turn. The steps run in this process: windows
with copies and without alternate. The copies move as much as a decode worker evicts under load.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from baton.bench.chaos.cluster import LocalCluster
from baton.bench.contract import Report, Row
from baton.bench.roles import Driver, prompt_of, request, worker_flags
from baton.bench.shapes import DENSE, write_shape
from baton.cluster import model

NEW_TOKENS = 32
POOL_PROMPTS = 5  # that fit into the pool
BEFORE = 4  # an old prompt is so many rounds old: each round brings two prompts into the pool
SIZE = {"cpu": "4GiB", "cuda": "24GiB"}
WRITTEN = {"cpu": 0.3, "cuda": 2.0}  # seconds after which a prompt is on the disk
GOALS = {"cpu": 0.5, "cuda": 0.25}
BATCH = {"cpu": 4, "cuda": 32}
CONTEXT = {"cpu": 200, "cuda": 2000}  # tokens of a request that decodes
STEPS = {"cpu": 8, "cuda": 40}  # of one window
BYTES_PER_S = {"cpu": 25e6, "cuda": 5e9}
STEP_GOALS = {"cpu": 1.1, "cuda": 1.02}
PLACES = 64


def first_tokens(args: argparse.Namespace, history: int) -> tuple[list[float], list[float]]:
    """Times to first token in seconds, from the tier and computed."""
    block = 128 if args.device == "cuda" else 16
    blocks = POOL_PROMPTS * -(-(history + 2 * NEW_TOKENS) // block)
    with tempfile.TemporaryDirectory() as name:
        flags, devices = worker_flags(args, Path(name), gpus=1)
        flags += ["--block-size", str(block), "--num-blocks", str(blocks)]
        if args.disk is None:
            flags += ["--host-cache-size", SIZE[args.device]]
        else:
            flags += ["--disk-cache-size", SIZE[args.device], "--disk-cache-dir", args.disk]
        with LocalCluster(
            Path(name), prefill=1, decode=0, router=False, worker_flags=flags, devices=devices
        ) as cluster:
            return asyncio.run(_first_tokens(args, cluster, history, block))


async def _first_tokens(
    args: argparse.Namespace, cluster: LocalCluster, history: int, block: int
) -> tuple[list[float], list[float]]:
    loaded: list[float] = []
    computed: list[float] = []
    async with Driver(cluster.report("prefill"), cluster.secret) as driver:

        async def ask(number: int, tail: int) -> tuple[float, int]:
            """Returns the time to first token, and how many tokens were cached."""
            prompt = [*prompt_of(history, number), *prompt_of(NEW_TOKENS, tail)]
            began = time.perf_counter()
            [(at, event)] = await driver.tokens(await driver.prefill(request(prompt, 1)), 1)
            if args.disk is not None:
                await asyncio.sleep(WRITTEN[args.device])
            return at - began, event.cached_tokens

        for number in range(BEFORE + 1 + args.rounds):  # the first old prompt warms up
            seconds, cached = await ask(number, 10_000 + number)
            assert cached < block, "a new prompt"
            if number < BEFORE:
                continue
            again, cached = await ask(number - BEFORE, 20_000 + number)
            # Else the worker had no time to copy the prompt before it was evicted.
            if cached >= 0.9 * history:
                computed.append(seconds)
                loaded.append(again)
    if 2 * len(loaded) <= args.rounds:
        raise RuntimeError(f"the tier had {len(loaded)} of {args.rounds + 1} prompts")
    return loaded[1:], computed[1:]


def steps(args: argparse.Namespace, directory: Path) -> tuple[list[float], list[float]]:
    """Median step times in seconds of windows with copies and without."""
    from baton.engine import EngineConfig, EngineRequest, SamplingParams, build_engine
    from baton.kv_transfer.stores import BlockStore
    from baton.kv_transfer.stores.disk_store import DiskStore
    from baton.kv_transfer.stores.host_store import open_host_store
    from baton.worker.engine_process.paged_kv import paged_kv

    device = args.device
    batch, context, count = BATCH[device], CONTEXT[device], STEPS[device]
    on_gpu = device == "cuda"
    engine = build_engine(
        EngineConfig(
            args.model or str(write_shape(DENSE, directory)), "bfloat16", device="cuda", load_format="dummy",
            max_model_len=16384, max_num_seqs=batch,
        )
        if on_gpu
        else EngineConfig(model.resolve(args.model).location, dtype="float32", num_threads=1)
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=(2 * args.rounds + 3) * count, ignore_eos=True)
    # All begin to decode together: beside decodes, so many prompts would take longer than the first ones run.
    for number in range(batch):
        prompt = EngineRequest(bytes([number]), prompt_of(context, number), sampling=sampling)
        engine.add(prompt, handover=True)
    held = 0
    while held < batch:
        held += len(engine.step().outputs)
    for number in range(batch):
        engine.resume(bytes([number]), bytes([number, 0]))
    kv = paged_kv(engine)
    store: BlockStore = open_host_store(kv, PLACES, lambda: None)
    if args.disk is not None:
        store = DiskStore(kv, PLACES, args.disk, lambda: None)
    copied = 0

    def window(*, copies: bool) -> float:
        nonlocal copied
        times: list[float] = []
        last, owed = time.perf_counter(), 0.0
        while len(times) < count:
            if not engine.step().outputs:
                continue
            now = time.perf_counter()
            times.append(now - last)
            owed += copies * (now - last) * BYTES_PER_S[device] / engine.block_bytes
            last = now
            store.ended()
            wanted = min(int(owed), store.room, PLACES)
            owed -= wanted
            places = range(copied, copied + wanted)
            store.save([(place % engine.num_blocks, place % PLACES) for place in places])
            copied += wanted
        return statistics.median(times)

    window(copies=True)
    found = [(window(copies=True), window(copies=False)) for _ in range(args.rounds)]
    store.close()
    engine.close()
    with_copies, without = zip(*found, strict=True)
    return list(with_copies), list(without)


def report(args: argparse.Namespace, history: int) -> Report:
    made = Report.of("reuse", args, history=history)
    name = f"reuse.{args.device}.{'host' if args.disk is None else 'disk'}_tier"
    loaded, computed = first_tokens(args, history)
    made.add_ratio(
        name, loaded, "ms", computed, "computing it", scale=1e3, p99=max(loaded) * 1e3,
        goal=GOALS[args.device] if args.disk is None else None,
    )  # fmt: skip
    made.add(Row(f"{name}.computed", statistics.median(computed) * 1e3, "ms"))
    with tempfile.TemporaryDirectory() as directory:
        busy, quiet = steps(args, Path(directory))
    made.add_ratio(f"{name}.step", busy, "ms", quiet, "no copies", scale=1e3, goal=STEP_GOALS[args.device])
    return made
