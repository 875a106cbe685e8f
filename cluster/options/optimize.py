"""The defaults that `--optimize` and the memory of the GPU choose for a worker. Pure."""

from bisect import bisect_right
from typing import NamedTuple

from baton.cluster.options.engine import AUTO, EngineOptions, Optimize
from baton.cluster.options.parameters import size_in_bytes

GPU_GIB = (70, 128)
"""From each of these memory sizes on, a GPU may run more requests. With an 8B model in bfloat16, 512 requests
on 140 GiB have as much KV memory each as 256 on 80 GiB."""
MAX_NUM_BATCHED_TOKENS = (2048, 8192, 8192)
"""For a CPU or a small GPU, then by `GPU_GIB`, as below. vLLM has the same defaults for large GPUs."""


HOST_PART = 4
LEAST_HOST_BYTES = 1 << 30
"""Less is not worth the copies."""


class Profile(NamedTuple):
    target_steps: float
    """The gap target, in times of the fastest step that only decodes."""
    max_num_seqs: tuple[int, int, int]


PROFILES: dict[Optimize, Profile] = {
    "latency": Profile(1.75, (32, 128, 128)),
    "balanced": Profile(3.5, (64, 256, 256)),
    "throughput": Profile(6.0, (64, 256, 512)),
}


class Chosen(NamedTuple):
    """What a worker uses: the given options, and defaults for the others."""

    max_num_seqs: int
    max_num_batched_tokens: int
    target_steps: float
    summary: str
    """One line for the log: the choice, and what it follows from."""


def choose(options: EngineOptions, device: str, gpu_gib: float | None) -> Chosen:
    """Returns the settings of a worker on `device`.

    `gpu_gib`: memory of the smallest GPU; None if it is unknown.
    """
    profile = PROFILES[options.optimize]
    on_gpu = device != "cpu"
    size = bisect_right(GPU_GIB, gpu_gib) if on_gpu and gpu_gib is not None else 0
    seqs = options.max_num_seqs or profile.max_num_seqs[size]
    tokens = options.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[size]
    hardware = "CPU" if not on_gpu else f"GPU of {gpu_gib:.0f} GiB" if gpu_gib else "GPU of unknown memory"
    parts = (
        f"--max-num-seqs {seqs}{_note(options.max_num_seqs)}",
        f"--max-num-batched-tokens {tokens}{_note(options.max_num_batched_tokens)}",
        f"gap target {profile.target_steps:g} times the fastest step"
        if options.itl_target is None
        else f"gap target {options.itl_target:g} ms{_note(options.itl_target)}",
    )
    summary = f"optimize {options.optimize}, {hardware}: {', '.join(parts)}"
    return Chosen(seqs, tokens, profile.target_steps, summary)


def host_cache(options: EngineOptions, device: str, gpus: int, available: int) -> int:
    """Bytes of the host's memory for cached KV of a worker: as given, or a part of a quarter of what the host
    has left.

    `gpus`: those of all workers that divide the quarter. `available`: bytes that the host has left.
    """
    if options.host_cache_size != AUTO:
        return size_in_bytes(options.host_cache_size)
    if device == "cpu" or options.enable_prefix_caching is False or options.engine != "baton":
        return 0
    ranks = options.tensor_parallel_size
    share = available // HOST_PART * ranks // max(ranks, gpus)
    return share if share >= LEAST_HOST_BYTES else 0


def _note(option: float | None) -> str:
    return "" if option is None else " (given)"
