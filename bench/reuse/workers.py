"""The workers that the bench starts: their flags and devices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import baton.bench.contract as contract
from baton.bench.shapes import DENSE, write_shape
from baton.cluster.gpus import visible_gpus


def require_gpus(args: argparse.Namespace, count: int) -> list[str]:
    """The GPUs of this machine. Exits if the bench needs more."""
    gpus = visible_gpus()
    if args.device == "cuda" and len(gpus) < count:
        print(f"bench.reuse needs {count} GPUs, and there are {len(gpus)}", file=sys.stderr)
        sys.exit(contract.EXIT_CANNOT_MEASURE)
    return gpus


def flags(args: argparse.Namespace, directory: Path, *, gpus: int) -> tuple[list[str], list[dict[str, str]]]:
    """The flags of so many workers, each on a GPU, and the environment of each. Exits if GPUs are missing."""
    if args.device == "cpu":
        # One thread each: otherwise two engines would compete for the cores of a small machine.
        model = ["--model", args.model] if args.model else []
        return ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", *model], [{}] * gpus
    found = require_gpus(args, gpus)[:gpus]
    model = args.model or str(write_shape(DENSE, directory))
    common = ["--device", "cuda", "--model", model, "--load-format", "dummy", "--max-model-len", "16384"]
    return [*common, "--kv-lanes", "8", "--kv-slots", "256"], [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in found]
