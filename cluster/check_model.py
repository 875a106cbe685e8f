"""Checks whether a model's files are complete and supported, before any role starts.

`faults` runs this module as a child process, because the check imports torch, which takes time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.model import EMBEDDED_NAME, ResolvedModel


@dataclass(frozen=True)
class Fault:
    """One problem of a model's files. `what` is "weights" (needed by workers) or "tokenizer" (by routers)."""

    what: str
    message: str


def faults(found: ResolvedModel, *, load_format: str = "auto") -> list[Fault]:
    """The problems for which workers or routers would refuse a model on this machine.

    A name on the hub is not checked, and weights are not checked without torch. The embedded model is not
    checked, because `model.resolve` has verified its digest.
    """
    if found.name == EMBEDDED_NAME or not Path(found.location).exists():
        return []
    command = [sys.executable, "-m", "cluster.check_model", found.location, load_format]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return [Fault("weights", f"{found.location} could not be checked: {last}")]
    return [Fault(**fault) for fault in json.loads(child.stdout)]


def check_files(found: ResolvedModel, load_format: str) -> None:
    """Raises ValueError for a model that `baton serve` cannot serve."""
    for fault in faults(found, load_format=load_format):
        raise ValueError(f"--model: {fault.message}")


def _faults(location: str, load_format: str) -> list[Fault]:
    from router.text.tokenizer import load_tokenizer

    found: list[Fault] = []
    try:
        from engine.api.config import EngineConfig
        from engine.loader import check_model

        check_model(EngineConfig(model=location, load_format=load_format))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
    except ValueError as error:
        found.append(Fault("weights", str(error)))
    try:
        load_tokenizer(location)
    except ValueError as error:
        found.append(Fault("tokenizer", str(error)))
    return found


if __name__ == "__main__":
    print(json.dumps([asdict(fault) for fault in _faults(*sys.argv[1:])]))
