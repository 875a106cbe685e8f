"""What the bits of a request depend on beside the model and the request, in the exact mode."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from baton.engine.api.config import EngineConfig
from baton.engine.execution.cache_limits import CacheLimits
from baton.engine.layers.weights import PlainFormat
from baton.kv_names.cache_kinds import LATENT

COMPUTES = "execution", "kernels", "layers", "loader", "models"
"""Rooms of the engine. Each has code that makes weights, adds, or rounds."""


def numerics_of(
    config: EngineConfig, limits: CacheLimits, weight_format: PlainFormat, device: torch.device
) -> str:
    """Names all of it. Workers with other code, versions or devices may compute other bits."""
    engine = Path(__file__).parents[1]
    experts = " with whole experts" if config.enable_expert_parallel else ""
    facts: dict[str, object] = {
        "device": _cpu(),
        "ranks": f"{config.tensor_parallel_size}{experts}",
        "dtype": str(limits.dtype).removeprefix("torch."),
        "kv": limits.formats.removeprefix("torch."),
        "format": weight_format.identity or weight_format.name,
        "code": hash_of_sources(engine / room for room in COMPUTES),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        import triton

        facts |= {"device": torch.cuda.get_device_name(device), "triton": triton.__version__}
    else:
        facts["threads"] = torch.get_num_threads()  # a product may be cut for them
    if any(array.kind == LATENT for layer in limits.cache for array in layer.arrays):
        facts["block"] = limits.block_size  # on a GPU it decides which kernel attends
    return "; ".join(f"{key}={value}" for key, value in facts.items())


def hash_of_sources(directories: Iterable[Path]) -> str:
    """Of all Python files in them, with their names."""
    digest = hashlib.blake2b(digest_size=8)
    for directory in directories:
        for path in sorted(directory.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{path.relative_to(directory.parent)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _cpu() -> str:
    """Libraries choose their code by the processor, not only by the vectors that it has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model} {torch.backends.cpu.get_cpu_capability()}".lstrip()
