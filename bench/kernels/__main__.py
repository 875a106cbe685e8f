from __future__ import annotations

import sys

import torch

from bench import kernels
from bench.contract import Report, parser
from bench.kernels.cases import Cases, Shape
from bench.kernels.measure import choices, graph_seconds, measure, sweep
from engine.kernels import kernels_for


def main() -> int:
    arguments = parser(kernels.__doc__ or "", devices=("cuda",))
    arguments.add_argument(
        "--sweep", action="store_true", help="time the attention kernels by their constants"
    )
    args = arguments.parse_args()
    device = torch.device("cuda")
    shape = Shape(batches=(1, 64), prompts=(2000,)) if args.short else Shape()
    cases = Cases(shape, kernels_for(device, shape.head_dim), device)
    report = Report(
        "kernels", {"shape": "llama-3.1-8b", "dtype": "bfloat16", "block_size": shape.block_size}, args.json
    )
    with torch.inference_mode():
        if args.sweep:
            report.rows += sweep(cases, graph_seconds, choices(cases))
        else:
            for make in cases:
                report.rows += measure(make, graph_seconds)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
