"""Names the kernels that a step launches and that no rehearsal has compiled:
`python -m tests.engine.rehearsed_kernels`.

A model on a CPU has the kernels of an H200, which note what Triton would compile and compute nothing.
"""

import gc
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from baton.bench.lab.shapes import LATENT, MOE, SHAPES
from baton.engine import EngineConfig, build_engine
from baton.engine.execution import start
from baton.engine.execution.memory_sizing import PoolSize
from baton.engine.execution.warmup import rehearsal_in, rehearse
from baton.engine.kernels import launch, skinny_linear
from baton.engine.kernels.triton_kernels import TritonKernels
from baton.engine.layers import linear, weights
from baton.engine.layers.linear import PlainLinear
from tests.engine.compile_kernels import NoDriver

SMALL = {"vocab_size": 512, "eos_token_id": 1}
DENSE = SMALL | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "head_dim": 128,
    "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = SHAPES[MOE] | SMALL | {"hidden_size": 256, "num_hidden_layers": 1, "num_experts": 32}
LATENTS = SHAPES[LATENT] | SMALL | {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "exact": (DENSE, {"batch_invariant": True}),
    "FP8 KV": (DENSE, {"kv_cache_dtype": "fp8"}),
    "experts": (EXPERTS, {}),
    "latents": (LATENTS, {}),
}
BLOCK, CONTEXT = 128, 20_000
STEPS = 44
launched = set[tuple[str, str]]()


def noted(self: Any, grid: Any) -> Any:
    def note(*args: Any, **kwargs: Any) -> None:
        binder = self.device_caches[0][4]
        _, kinds, options = binder(*args, **kwargs, debug=False, instrumentation_mode="")
        launched.add((self.fn.__name__, f"{kinds} {options}"))

    return note


def written(*args: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    """What kernels would write: numbers, which are finite."""
    return (torch.ones if dtype is torch.bool else torch.zeros)(*args, dtype=dtype, device=device)


def kernels_of_a_gpu(device: torch.device, head_dim: int, *, exact: bool = False) -> TritonKernels:
    return TritonKernels(device, head_dim, exact=exact)


def like_a_gpu() -> None:
    triton.runtime.driver.set_active(NoDriver())
    JITFunction.__getitem__ = noted
    torch.empty, torch.empty_like, torch.Tensor.new_empty = written, torch.zeros_like, torch.Tensor.new_zeros
    launch.INTERPRETED_MULTIPROCESSORS = 132  # pyrefly: ignore[bad-assignment]
    skinny_linear.from_hopper_on = lambda device: True
    linear.packs_plain = lambda dtype, device: False
    start.kernels_for = weights.kernels_for = kernels_of_a_gpu


def lacking(model: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    """Yields each kernel of a step, and its sizes, that the rehearsal does not have."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model))
        config = EngineConfig(
            directory, dtype="bfloat16", load_format="dummy", num_blocks=400, block_size=BLOCK,
            max_model_len=CONTEXT, overlap=False, cuda_graphs=False, **settings,
        )  # fmt: skip
        runner = build_engine(config).runner
    for each in gc.get_objects():
        if type(each) is PlainLinear:
            each.form = None
            each.product = linear._product(each.weight, each.bias, exact=config.batch_invariant)
    rehearsal = rehearsal_in(PoolSize(400, CONTEXT), config, BLOCK)
    runner.cache.table_width = -(-CONTEXT // (16 * BLOCK)) * 16
    launched.clear()
    for _ in rehearse(runner, rehearsal, lambda done: None):
        pass
    chosen, most = random.Random(1), config.max_num_batched_tokens - config.max_num_seqs
    for number in range(STEPS):
        rows, tokens = 0, 1 << number // 2 % 11
        if number % 2:
            rows, tokens = chosen.choice((0, 1, 31, 63)), min(most, int(2 ** chosen.uniform(0, 11.5)))
        position, known = chosen.randrange(CONTEXT - tokens), {*launched}
        step = rehearsal.sized(
            rows, rows * chosen.randrange(1, CONTEXT), tokens, position,
            table_width=runner.cache.table_width, vocab_size=SMALL["vocab_size"],
        )  # fmt: skip
        runner.sample(runner.run(step, lambda _: None), None)
        for name, variant in launched - known:
            yield f"{name} beside {rows} decodes, {tokens} tokens from {position} on: {variant}"


if __name__ == "__main__":
    like_a_gpu()
    for name, (shape, given) in MODELS.items():
        for found in lacking(shape, given):
            print(f"{name}: {found}")
        print(f"{name}: {len(launched)} kernels")
