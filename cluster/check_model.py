"""Checks whether a model's files are complete and supported, before any role starts.

`faults` runs this module as a child process, because the check imports torch, which takes time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.model import EMBEDDED_NAME, ResolvedModel


@dataclass(frozen=True)
class Fault:
    """One problem of a model.

    `what` is "weights" (needed by workers), "ranks" (its heads do not divide over the ranks of a worker) or
    "tokenizer" (needed by routers).
    """

    what: str
    message: str


def faults(
    found: ResolvedModel,
    *,
    load_format: str = "auto",
    quantization: str = "auto",
    tensor_parallel_size: int = 1,
) -> list[Fault]:
    """The problems for which workers or routers would refuse a model on this machine.

    A name on the hub is not checked, and weights are not checked without torch. The files of the embedded
    model are not checked, because `model.resolve` has verified its digest.
    """
    verified = found.name == EMBEDDED_NAME and tensor_parallel_size == 1 and quantization == "auto"
    if verified or not Path(found.location).exists():
        return []
    arguments = (found.location, load_format, quantization, str(tensor_parallel_size))
    command = [sys.executable, "-m", "cluster.check_model", *arguments]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return [Fault("weights", f"{found.location} could not be checked: {last}")]
    return [Fault(**fault) for fault in json.loads(child.stdout)]


def check_files(found: ResolvedModel, load_format: str, quantization: str, tensor_parallel_size: int) -> None:
    """Raises ValueError for a model that `baton serve` cannot serve."""
    for fault in faults(
        found,
        load_format=load_format,
        quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
    ):
        own = fault.message.startswith("--")
        raise ValueError(fault.message if own else f"--model: {fault.message}")


def _faults(location: str, load_format: str, quantization: str, tensor_parallel_size: int) -> list[Fault]:
    from router.text.tokenizer import load_tokenizer

    found: list[Fault] = []
    what = "weights"
    try:
        from engine.api.config import EngineConfig
        from engine.loader import check_model

        engine = EngineConfig(model=location, load_format=load_format, quantization=quantization)
        check_model(engine)
        if tensor_parallel_size > 1:
            what = "ranks"
            check_model(replace(engine, tensor_parallel_size=tensor_parallel_size))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
    except ValueError as error:
        found.append(Fault(what, str(error)))
    try:
        load_tokenizer(location)
    except ValueError as error:
        found.append(Fault("tokenizer", str(error)))
    return found


if __name__ == "__main__":
    location, load_format, quantization, tensor_parallel_size = sys.argv[1:]
    found = _faults(location, load_format, quantization, int(tensor_parallel_size))
    print(json.dumps([asdict(fault) for fault in found]))
