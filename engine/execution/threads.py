"""What an engine computes on, and how many threads torch has on a CPU."""

import torch

from baton.engine.api.config import EngineConfig
from baton.engine.layers.ranks import Ranks
from baton.system import cpu_names, usable_cpus


def set_threads(config: EngineConfig, ranks: Ranks) -> None:
    """Gives this process its share of the threads of all ranks.

    By default torch has a thread for each CPU of the machine, whatever quota the container has."""
    threads = config.num_threads or min(torch.get_num_threads(), usable_cpus())
    torch.set_num_threads(max(1, threads // ranks.size))


def device_names(device: torch.device) -> list[str]:
    """Names of the CPUs or of the GPU of this rank. Engines with a name in common take time from each
    other."""
    if device.type == "cuda":
        return [f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
    return cpu_names()
