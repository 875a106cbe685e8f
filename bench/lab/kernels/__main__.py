import sys
from dataclasses import replace
from typing import Any

import torch

from baton.bench.lab import kernels as about
from baton.bench.lab.driver import parser, report_of
from baton.bench.lab.kernels.cases import Cases, DenseCases, Shape, graph_seconds, measure
from baton.bench.lab.kernels.delta import DeltaCases, DeltaShape
from baton.bench.lab.kernels.latent import LatentCases, LatentShape
from baton.bench.lab.kernels.mamba2 import Mamba2Cases, Mamba2Shape
from baton.bench.lab.kernels.moe import MoeCases, MoeShape
from baton.bench.lab.kernels.quantized import Fp8Cases, Int4Cases
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


def main() -> int:
    arguments = parser(about.__doc__ or "", devices=("cuda",))
    arguments.add_argument("--model-shape", choices=HEAD_DIM, default=DENSE, help="default: %(default)s")
    arguments.add_argument(
        "--quantization",
        choices=("fp8", "int4"),
        help="the kernels of quantized weights, or of latents in FP8",
    )
    args = arguments.parse_args()
    device = torch.device("cuda")
    kernels, short = kernels_for(device, HEAD_DIM[args.model_shape]), args.short
    if args.model_shape == MOE:
        cases: Cases[Any] = MoeCases(MoeShape(tokens=(1, 64, 2000)) if short else MoeShape(), kernels, device)
    elif args.model_shape == LATENT:
        latents = LatentShape(fp8=args.quantization == "fp8")
        cases = LatentCases(replace(latents, batches=(1, 64)) if short else latents, kernels, device)
    elif args.model_shape == BAMBA:
        of_layer = Mamba2Shape(batches=(1, 64), prompts=((1, 2000),)) if short else Mamba2Shape()
        cases = Mamba2Cases(of_layer, kernels, device)
    elif args.model_shape in DELTAS:
        delta = DELTAS[args.model_shape]
        cases = DeltaCases(
            replace(delta, batches=(1, 64), prompts=((1, 2000),)) if short else delta, kernels, device
        )
    else:
        shape = Shape(batches=(1, 64), prompts=(2000,)) if short else Shape()
        kind = {None: DenseCases, "fp8": Fp8Cases, "int4": Int4Cases}[args.quantization]
        cases = kind(shape, kernels, device)
    report = report_of("kernels", args, dtype="bfloat16")
    with torch.inference_mode():
        for make in cases:
            report.rows += measure(make, graph_seconds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
