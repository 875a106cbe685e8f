"""How fast one engine is: `python -m baton.bench.engine`.

On a CPU (`on_cpu`) the embedded model runs in turns with transformers. On a GPU (`on_gpu`) a model's shape
runs with random weights: by default that of Llama 3.1 8B, else a mixture of experts, or a model with state
layers or windows. Each figure has a floor, measured on the same card in the same process (`floor`), or
computed from the bytes. With `--tensor-parallel-size` an engine over several devices runs against the same
engine on one (`on_ranks`).
"""

import sys
from argparse import Namespace

from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.engine.on_gpu import case_of
from baton.bench.lab.shapes import DENSE, HYBRIDS, LATENT, MOE, SEEING, SPARSE, WINDOWED


def measure(run: Run) -> None:
    if run.args.tensor_parallel_size > 1:
        from baton.bench.lab.engine.on_ranks import measure
    elif run.on_gpus and run.args.positions:
        from baton.bench.lab.engine.positions import measure
    elif run.on_gpus:
        from baton.bench.lab.engine.on_gpu import measure
    else:
        from baton.bench.lab.engine.on_cpu import measure
    measure(run)


def check(args: Namespace) -> None:
    if case_of(args) is None:
        raise ValueError(f"--model-shape {args.model_shape}: not measured in this format of weights and KV")


BENCH = Bench(
    "engine",
    measure,
    __doc__,
    options=(
        Option("--tensor-parallel-size", "compare an engine over N devices with the same on one", 1),
        Option(
            "--model-shape",
            "what runs on GPUs",
            DENSE,
            choices=(DENSE, MOE, LATENT, SPARSE, SEEING, *HYBRIDS, *WINDOWED),
        ),
        Option("--quantization", "quantize the weights on load, on one GPU", choices=("fp8", "int4")),
        Option("--kv-cache-dtype", "of the dense shape on one GPU", choices=("fp8",)),
        Option("--state-dtype", "of a shape with states, on one GPU", choices=("bfloat16", "float16")),
        Option("--batch-invariant", "also measure the exact mode, beside the default in the same run", False),
        Option("--positions", "on a GPU: decodes at 2,000 to 128,000 positions, and prompts", False),
    ),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
