"""The GPU kernels of the layers, against torch and the limit of the hardware.

    python -m baton.bench.kernels --device cuda [--json PATH]     all kernels, Llama-3.1-8B's shapes, bfloat16
    python -m baton.bench.kernels --device cuda --model-shape qwen3-30b-a3b   those of a mixture of experts
    python -m baton.bench.kernels --device cuda --model-shape bamba-9b        those of state layers
    python -m baton.bench.kernels --device cuda --quantization fp8|int4       those of quantized weights

`cases`, `moe`, `latent`, `states` and `quantized` say what each kernel and torch compute, and how many
bytes and operations that takes. Times are of replayed CUDA graphs. The input sets of a
case together exceed the L2 cache. Bytes count each input and output once; operations exclude what causality
makes unnecessary. A kernel that bandwidth limits has rows in GB/s, one that arithmetic limits in TFLOP/s.
`of_limit` is its share of an H200's limit.
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.kernels.cases import Cases, DenseCases, Shape, graph_seconds, rows_of
from baton.bench.lab.kernels.latent import LatentCases, LatentShape
from baton.bench.lab.kernels.moe import MoeCases, MoeShape
from baton.bench.lab.kernels.quantized import Fp8Cases, Int4Cases
from baton.bench.lab.kernels.states import DeltaCases, DeltaShape, Mamba2Cases, Mamba2Shape
from baton.bench.lab.shapes import BAMBA, DENSE, GATED_DELTA, KIMI_DELTA, LATENT, MOE
from baton.engine.kernels import kernels_for

DELTAS = {GATED_DELTA: DeltaShape(), KIMI_DELTA: DeltaShape(groups=32, of_keys=True)}
HEAD_DIM = {
    DENSE: Shape().head_dim,
    MOE: 128,
    BAMBA: Mamba2Shape().head_dim,
    LATENT: 256,
    **dict.fromkeys(DELTAS, DeltaShape().head_dim),
}


def cases_of(run: Run) -> Cases[Any]:
    device, short, name = torch.device("cuda"), run.short, run.args.model_shape
    kernels = kernels_for(device, HEAD_DIM[name])
    if name == MOE:
        return MoeCases(MoeShape(tokens=(1, 64, 2000)) if short else MoeShape(), kernels, device)
    if name == LATENT:
        latents = LatentShape(fp8=run.args.quantization == "fp8")
        return LatentCases(replace(latents, batches=(1, 64)) if short else latents, kernels, device)
    few: dict[str, Any] = {"batches": (1, 64), "prompts": ((1, 2000),)} if short else {}
    if name == BAMBA:
        return Mamba2Cases(Mamba2Shape(**few), kernels, device)
    if name in DELTAS:
        return DeltaCases(replace(DELTAS[name], **few), kernels, device)
    kind = {None: DenseCases, "fp8": Fp8Cases, "int4": Int4Cases}[run.args.quantization]
    return kind(Shape(batches=(1, 64), prompts=(2000,)) if short else Shape(), kernels, device)


def measure(run: Run) -> None:
    with torch.inference_mode():
        for make in cases_of(run):
            run.rows += rows_of(make, graph_seconds)


BENCH = Bench(
    "kernels",
    measure,
    __doc__,
    options=(
        Option("--model-shape", "", DENSE, choices=HEAD_DIM),
        Option(
            "--quantization", "kernels of quantized weights, or of latents in FP8", choices=("fp8", "int4")
        ),
    ),
    devices=("cuda",),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
