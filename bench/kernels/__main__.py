from __future__ import annotations

import sys

import torch

from baton.bench import kernels
from baton.bench.contract import Report, parser
from baton.bench.kernels.cases import Cases, Shape
from baton.bench.kernels.mamba2 import Mamba2Cases, Mamba2Shape
from baton.bench.kernels.measure import graph_seconds, limits, measure
from baton.bench.kernels.moe import MoeCases, MoeShape
from baton.bench.kernels.quantized import Fp8Cases, Int4Cases
from baton.bench.shapes import BAMBA, DENSE, MOE
from baton.engine.kernels import kernels_for


def main() -> int:
    arguments = parser(kernels.__doc__ or "", devices=("cuda",))
    arguments.add_argument(
        "--model-shape", choices=(DENSE, MOE, BAMBA), default=DENSE, help="default: %(default)s"
    )
    arguments.add_argument("--quantization", choices=("fp8", "int4"), help="the kernels of quantized weights")
    args = arguments.parse_args()
    device = torch.device("cuda")
    parameters = {"shape": args.model_shape, "dtype": "bfloat16"}
    if args.model_shape == MOE:
        cases = MoeCases(MoeShape(tokens=(1, 64, 2000)) if args.short else MoeShape(), device)
    elif args.model_shape == BAMBA:
        of_layer = Mamba2Shape(batches=(1, 64), prompts=((1, 2000),)) if args.short else Mamba2Shape()
        cases = Mamba2Cases(of_layer, kernels_for(device, of_layer.head_dim), device)
    else:
        shape = Shape(batches=(1, 64), prompts=(2000,)) if args.short else Shape()
        parameters |= {"block_size": shape.block_size, "quantization": args.quantization}
        kind = {None: Cases, "fp8": Fp8Cases, "int4": Int4Cases}[args.quantization]
        cases = kind(shape, kernels_for(device, shape.head_dim), device)
    report = Report("kernels", parameters, args.json)
    with torch.inference_mode():
        plain = limits(device, graph_seconds)
        for make in cases:
            report.rows += measure(make, graph_seconds, plain)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
