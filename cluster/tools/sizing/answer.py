"""Searches the smallest pools that meet the latency targets, and explains what limits them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from baton.cluster.options.clients import SizingOptions
from baton.cluster.tools.sizing.simulated import Decoded, Latency, decode, prefill
from baton.cluster.tools.sizing.speeds import Speeds

WAITED = 0.01
"""Largest share of requests that may wait for a slot in the batch of a decode worker."""


class Targets(NamedTuple):
    """For the 99th percentile, in seconds."""

    ttft: float
    ttit: float


@dataclass(frozen=True)
class Answer:
    """The pools and their simulated latencies.

    Attributes:
        kv_bytes, kv_room: largest use of KV memory in one decode worker, and its capacity, in bytes.
        why: the limit of the prefill pool and of the decode pool, for people.
    """

    prefill: int
    decode: int
    ttft: Latency
    decoded: Decoded
    prefill_busy: float
    kv_bytes: int
    kv_room: int
    why: tuple[str, str]


def answer(of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, targets: Targets) -> Answer:
    """Sizes both pools, from the speeds of their workers.

    Raises ValueError if no number of workers can meet the targets.
    """
    alone = of_prefill.steps.prefill(load.input)
    if targets.ttft < alone:
        raise ValueError(
            f"--slo ttft={targets.ttft * 1e3:.0f}: one prefill of {load.input} tokens takes "
            f"{alone * 1e3:.1f} ms on an idle worker, and no number of workers makes it shorter; "
            "a larger --prefill-tensor-parallel-size may"
        )
    context = load.input + load.output
    shortest = of_decode.steps.decode(1, context)
    if targets.ttit < shortest:
        raise ValueError(
            f"--slo ttit={targets.ttit * 1e3:.1f}: a step with a single request takes {shortest * 1e3:.2f} "
            "ms, and no number of workers makes it shorter; a larger --decode-tensor-parallel-size may"
        )
    of_prefill.kv_room(load.gpu_memory_utilization)
    room = of_decode.kv_room(load.gpu_memory_utilization)
    in_memory = int(room // of_decode.kv_bytes(context))
    if not in_memory:
        raise ValueError(
            f"a request of {context} tokens needs more KV memory than one worker has ({room / 1e9:.1f} GB); "
            "reduce --input or --output, or choose a smaller --model"
        )
    workers, ttft, prefill_why = _prefill_pool(of_prefill, load, targets.ttft, alone)
    slots = min(load.max_num_seqs, in_memory)
    decoders, decoded, decode_why = _decode_pool(of_decode, load, targets.ttit, slots, in_memory)
    return Answer(
        prefill=workers,
        decode=decoders,
        ttft=ttft,
        decoded=decoded,
        prefill_busy=load.rate * alone / workers,
        kv_bytes=int(decoded.most * of_decode.kv_bytes(context)),
        kv_room=room,
        why=(prefill_why, decode_why),
    )


def _prefill_pool(speeds: Speeds, load: SizingOptions, ttft: float, alone: float) -> tuple[int, Latency, str]:
    least = math.floor(load.rate * alone) + 1  # with fewer workers the queue grows without bound
    workers = least
    before: Latency | None = None
    while True:
        found = prefill(speeds.steps, workers=workers, rate=load.rate, tokens=load.input)
        if found.p99 <= ttft * (1 + 1e-9):  # tolerates rounding errors of the simulated clock
            break
        before = found
        workers += max(1, workers // 50)
    if before is not None:
        why = f"TTFT decides: with fewer workers its p99 is {before.p99 * 1e3:.0f} ms"
    else:
        why = f"capacity decides: prompts alone keep {load.rate * alone:.2f} workers busy"
    return workers, found, why


def _decode_pool(
    speeds: Speeds, load: SizingOptions, ttit: float, slots: int, in_memory: int
) -> tuple[int, Decoded, str]:
    if load.output == 1:
        idle = Decoded(Latency(0.0, 0.0), 0.0, 0.0, 0)
        return 0, idle, "prefill workers alone answer requests of one token"

    def keeps(found: Decoded) -> bool:
        return found.gap.p99 <= ttit and found.waited <= WAITED

    def tried(workers: int) -> Decoded:
        return decode(
            speeds.steps, rate=load.rate / workers, prompt=load.input, output=load.output, slots=slots
        )

    low, high = 0, 1
    found = {high: tried(high)}
    while not keeps(found[high]):
        low, high = high, 2 * high
        found[high] = tried(high)
    while high - low > 1:
        middle = (low + high) // 2
        found[middle] = tried(middle)
        low, high = (low, middle) if keeps(found[middle]) else (middle, high)
    if low == 0:
        return high, found[high], "one worker is enough"
    fewer = found[low]
    if fewer.gap.p99 > ttit:
        why = f"TTIT decides: with {low} its p99 is {fewer.gap.p99 * 1e3:.1f} ms"
    elif slots == in_memory:
        why = f"KV memory decides: {slots} requests fit a worker; with {low} workers {fewer.waited:.0%} wait"
    else:
        why = f"--max-num-seqs {slots} decides: with {low} workers {fewer.waited:.0%} of the requests wait"
    return high, found[high], why
