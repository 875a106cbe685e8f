"""Which workers `baton serve` starts on the GPUs of this machine, if it is not told. Pure.

1. GPUs that other processes use are left out: a worker takes `--gpu-memory-utilization` of each GPU.
2. A worker has the fewest GPUs that hold the model.
3. The GPUs are divided as evenly as a load of agents allows. If only one worker fits, it does both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.system.words import counted

PREFILL_BUSY = 0.75
"""Share of time that a prefill worker should compute. Near 1 queues grow without bound."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use.

    Attributes:
        name: for CUDA_VISIBLE_DEVICES.
        total_gib, used_gib: memory; 0: unknown.
    """

    name: str
    total_gib: float = 0.0
    used_gib: float = 0.0


class Ranks(NamedTuple):
    """GPUs of a worker of each pool."""

    prefill: int = 1
    decode: int = 1


ONE_EACH = Ranks()


@dataclass(frozen=True)
class Needs:
    """What a model needs of a worker, and how fast it then is.

    Attributes:
        ranks: GPUs of a worker.
        prefill_rate, decode_rate: turns of agents that a prefill worker and a decode worker do in a second.
        known: they were computed. Otherwise one GPU is assumed, and pools of equal size.
    """

    ranks: Ranks = ONE_EACH
    prefill_rate: float = 1.0
    decode_rate: float = 1.0
    known: bool = False


@dataclass(frozen=True)
class GpuPools:
    """The choice.

    Attributes:
        gpus: names for CUDA_VISIBLE_DEVICES, of all GPUs that are not in use.
        text: one line for the user: the choice, its reasons, and how to choose otherwise.
    """

    prefill: int
    decode: int
    ranks: Ranks
    gpus: tuple[str, ...]
    text: str


def free_gpus(gpus: Sequence[Gpu], utilization: float) -> list[Gpu]:
    """Those on which a worker finds its share of the memory."""
    return [gpu for gpu in gpus if gpu.used_gib <= (1 - utilization) * gpu.total_gib]


CHOOSE = "--prefill, --decode, --tensor-parallel-size and CUDA_VISIBLE_DEVICES"


def choose_pools(gpus: Sequence[Gpu], needs: Needs, utilization: float) -> GpuPools:
    """Chooses the pools for all GPUs that are visible. Raises ValueError if no worker fits."""
    free, (of_prefill, of_decode) = free_gpus(gpus, utilization), needs.ranks
    skipped = [
        f" GPU {gpu.name} is skipped: {gpu.used_gib:.0f} of its {gpu.total_gib:.0f} GiB are in use."
        for gpu in gpus
        if gpu not in free
    ]
    if len(free) < of_decode:
        raise ValueError(
            f"a worker needs {counted(of_decode, 'GPU')}, and {len(free)} of {len(gpus)} are free."
            f"{''.join(skipped)} Free some, choose with {CHOOSE}, or run on the CPU with --device cpu"
        )
    prefill, decode = _divided(len(free), needs)
    used = prefill * of_prefill + decode * of_decode
    text = (
        f"{_named(free[:used])}: --prefill {prefill} --decode {decode}, {counted(of_decode, 'GPU')} a worker"
    )
    if of_prefill != of_decode:
        text = text.replace("a worker", f"a decode worker, {counted(of_prefill, 'GPU')} a prefill worker")
    if needs.known:
        text += ": the fewest that hold the model" + (", divided for turns of agents" if prefill else "")
    text += "." if prefill else ". Each does both."
    text += "".join(skipped) + (f" {_named(free[used:])}: left over." if free[used:] else "")
    names = tuple(gpu.name for gpu in free)
    return GpuPools(prefill, decode, needs.ranks, names, f"{text} Choose otherwise with {CHOOSE}.")


def _named(gpus: Sequence[Gpu]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpu.name for gpu in gpus)}"


def _divided(gpus: int, needs: Needs) -> tuple[int, int]:
    """Workers of both pools. Of equally even divisions it is that with more decode workers.

    With an even division, first turns wait least, and routers give work of one pool to the other. So it is
    the most even one of which neither pool is overloaded, while the pools with the best rate are as busy as
    the autoscaler wants them to be."""
    of_prefill, of_decode = needs.ranks
    if gpus < of_prefill + of_decode:
        return 0, gpus // of_decode
    counts = range(1, (gpus - of_decode) // of_prefill + 1)
    divisions = [(prefill, (gpus - prefill * of_prefill) // of_decode) for prefill in counts]
    rates = [min(p * needs.prefill_rate, d * needs.decode_rate) for p, d in divisions]
    good = [pools for pools, rate in zip(divisions, rates, strict=True) if rate >= PREFILL_BUSY * max(rates)]
    return min(good, key=lambda pools: (abs(pools[0] - pools[1]), pools[0]))
