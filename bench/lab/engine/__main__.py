import sys

import baton.bench.lab.driver as driver
from baton.bench.lab.driver import report_of
from baton.bench.lab.engine.on_gpu import case_of
from baton.bench.lab.shapes import DENSE, HYBRIDS, LATENT, MOE, SEEING, SPARSE, WINDOWED


def main() -> int:
    p = driver.parser("One engine: against transformers on a CPU, against the floor of the card on a GPU.")
    p.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N",
                   help="compare an engine over N devices with the same on one")  # fmt: skip
    p.add_argument("--model-shape", choices=(DENSE, MOE, LATENT, SPARSE, SEEING, *HYBRIDS, *WINDOWED),
                   default=DENSE, help="what runs on GPUs (default: %(default)s)")  # fmt: skip
    p.add_argument("--quantization", choices=("fp8", "int4"), help="quantize the weights on load, on one GPU")
    p.add_argument("--kv-cache-dtype", choices=("fp8",), help="of the dense shape on one GPU")
    p.add_argument("--batch-invariant", action="store_true",
                   help="also measure the exact mode, beside the default in the same run")  # fmt: skip
    p.add_argument("--positions", action="store_true",
                   help="on a GPU: decodes at 2,000 to 128,000 positions, and prompts")  # fmt: skip
    args = p.parse_args()
    if case_of(args) is None:
        p.error(f"--model-shape {args.model_shape}: not measured in this format of weights and KV")
    report = report_of("engine", args)
    if args.tensor_parallel_size > 1:
        from baton.bench.lab.engine.on_ranks import measure
    elif args.device == "cuda" and args.positions:
        from baton.bench.lab.engine.positions import measure
    elif args.device == "cuda":
        from baton.bench.lab.engine.on_gpu import measure
    else:
        from baton.bench.lab.engine.on_cpu import measure
    measure(args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
