from __future__ import annotations

import sys

import torch

from baton.bench import kernels
from baton.bench.contract import Report, parser
from baton.bench.kernels.cases import Cases, Shape
from baton.bench.kernels.fp8 import Fp8Cases
from baton.bench.kernels.fp8_kv import Fp8KVCases
from baton.bench.kernels.int4 import Int4Cases
from baton.bench.kernels.mamba2 import Mamba2Cases, Mamba2Shape
from baton.bench.kernels.measure import (
    choices,
    fp8_choices,
    fp8_kv_choices,
    graph_seconds,
    int4_choices,
    limits,
    mamba2_choices,
    measure,
    moe_choices,
    sweep,
)
from baton.bench.kernels.moe import MoeCases, MoeShape
from baton.bench.shapes import BAMBA, DENSE, MOE
from baton.engine.kernels import kernels_for


def main() -> int:
    arguments = parser(kernels.__doc__ or "", devices=("cuda",))
    arguments.add_argument("--sweep", action="store_true", help="time some kernels by their constants")
    arguments.add_argument(
        "--model-shape", choices=(DENSE, MOE, BAMBA), default=DENSE, help="default: %(default)s"
    )
    arguments.add_argument("--quantization", choices=("fp8", "int4"), help="the kernels of quantized weights")
    arguments.add_argument("--kv-cache-dtype", choices=("fp8",), help="the kernels of a KV cache in FP8")
    args = arguments.parse_args()
    device = torch.device("cuda")
    parameters = {"shape": args.model_shape, "dtype": "bfloat16"}
    if args.model_shape == MOE:
        cases = MoeCases(MoeShape(tokens=(1, 64, 2000)) if args.short else MoeShape(), device)
        swept = moe_choices(cases)
    elif args.model_shape == BAMBA:
        of_layer = Mamba2Shape(batches=(1, 64), prompts=((1, 2000),)) if args.short else Mamba2Shape()
        cases = Mamba2Cases(of_layer, kernels_for(device, of_layer.head_dim), device)
        swept = mamba2_choices(cases)
    else:
        shape = Shape(batches=(1, 64), prompts=(2000,)) if args.short else Shape()
        parameters["block_size"] = shape.block_size
        on = shape, kernels_for(device, shape.head_dim), device
        for name in ("quantization", "kv_cache_dtype"):
            if given := getattr(args, name):
                parameters[name] = given
        if args.kv_cache_dtype:
            cases = Fp8KVCases(*on)
            swept = fp8_kv_choices(cases)
        elif args.quantization == "fp8":
            cases = Fp8Cases(*on)
            swept = fp8_choices(cases)
        elif args.quantization == "int4":
            cases = Int4Cases(*on)
            swept = int4_choices(cases)
        else:
            cases = Cases(*on)
            swept = choices(cases)
    report = Report("kernels", parameters, args.json)
    with torch.inference_mode():
        plain = limits(device, graph_seconds)
        if args.sweep:
            report.rows += sweep(graph_seconds, plain, swept)
        else:
            for make in cases:
                report.rows += measure(make, graph_seconds, plain)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
