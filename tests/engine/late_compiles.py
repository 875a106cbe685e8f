"""Finds kernels that an engine compiles after its start, on a machine without a GPU:
`python -m tests.engine.late_compiles`.

An engine compiles its kernels for an H200 but does not execute them: results are zeros, and tokens are made
up. It runs the rehearsal of a start, then traffic of all kinds. The traffic must compile nothing.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from tests.engine.compile_kernels import NoDriver

SIZES: Any = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "num_blocks": 3000, "block_size": 16}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "presence_penalty": 1.0},
]
TOKEN = 5
STEPS = 400

compiled: list[str] = []


def compile_instead(self: Any, grid: Any) -> Any:
    def launch(*args: Any, **kwargs: Any) -> None:
        known = sum(len(caches[0]) for caches in self.device_caches.values())
        self.run(*args, grid=grid, warmup=True, **kwargs)
        if sum(len(caches[0]) for caches in self.device_caches.values()) > known:
            constants = {name: value for name, value in kwargs.items() if name.isupper()}
            numbers = [value for value in args if isinstance(value, int)]
            compiled.append(f"{self.fn.__name__} {constants} {numbers}")

    return launch


def main() -> int:
    triton.runtime.driver.set_active(NoDriver())
    JITFunction.__getitem__ = compile_instead
    for owner, name in ((torch, "{}"), (torch, "{}_like"), (torch.Tensor, "new_{}")):
        setattr(owner, name.format("empty"), getattr(owner, name.format("zeros")))

    from baton.engine import EngineConfig, build_engine
    from baton.engine.execution import start
    from baton.engine.execution.warmup import Rehearsal, warm_up
    from baton.engine.kernels.sampling import race
    from baton.engine.kernels.triton_kernels import TritonKernels
    from baton.engine.layers import weights
    from tests.engine.conftest import request_of, save_tiny

    def kernels_for(_: torch.device, head_dim: int, *, exact: bool = False) -> TritonKernels:
        return TritonKernels(torch.device("cpu"), head_dim, exact=exact)

    original: Any = race.draw

    def made_up(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, finite = original(*args)
        return tokens.fill_(TOKEN), finite.fill_(True)

    for module, name, instead in (
        (start, "kernels_for", kernels_for),
        (weights, "kernels_for", kernels_for),
        (race, "draw", made_up),
        (TritonKernels, "greedy", staticmethod(made_up)),
        (TritonKernels, "draw", staticmethod(made_up)),
    ):
        setattr(module, name, instead)

    with tempfile.TemporaryDirectory() as directory:
        save_tiny(Path(directory), "Llama", max_position_embeddings=4096)
        warm = build_engine(EngineConfig(directory, dtype="float32", **SIZES))
    rehearsal = Rehearsal(EngineConfig(directory, **SIZES), 4096, SIZES["block_size"])
    warm_up(warm.runner, rehearsal, lambda *_: None)
    print(f"{len(compiled)} kernels compiled by the rehearsal", *compiled, sep="\n  ")
    compiled.clear()
    rng = random.Random(0)
    for number in range(STEPS):
        stats = warm.stats()
        if stats.requests_running + stats.requests_waiting < rng.choice([1, 5, 20, 63]):
            prompt = [TOKEN] * rng.choice([1, 2, 17, 100, 600, 1500, 3000])
            extra: Any = {
                **rng.choice(SAMPLING),
                "max_tokens": rng.randrange(1, 40),
                "ignore_eos": True,
            }
            warm.add(request_of(number, prompt, **extra))
        warm.loop.step()
    print(f"{len(compiled)} more in {STEPS} steps", *compiled, sep="\n  ")
    return bool(compiled)


if __name__ == "__main__":
    sys.exit(main())
