"""Checks whether a model's files are complete and supported, before any role starts.

`faults` runs this module as a child process, because the check imports torch, which takes time and memory.
"""

import gc
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.cluster.model import EMBEDDED_NAME, ResolvedModel
from baton.cluster.options.engine import EngineOptions, ModelOptions
from baton.processes import spawn

RANKS: dict[str, Any] = {"tensor_parallel_size": 1, "enable_expert_parallel": False}
"""The options that divide a model, and their values for a worker of one rank."""


@dataclass(frozen=True)
class Fault:
    """One problem of a model.

    `what` is "weights" (needed by workers), "ranks" (its heads or experts do not divide over the ranks of a
    worker) or "tokenizer" (needed by routers).
    """

    what: str
    message: str


def faults(resolved: ResolvedModel, engine: EngineOptions, model: ModelOptions | None = None) -> list[Fault]:
    """The problems for which workers or routers would refuse a model on this machine.

    A name on the hub is not checked, and weights are not checked without torch or for vLLM. The files of the
    embedded model are not checked: pip has verified them.
    """
    model = model or ModelOptions()
    ranks = engine.tensor_parallel_size > 1 or engine.enable_expert_parallel
    as_usual = not ranks and not engine.encoder_pool and engine.quantization == "auto"
    plain = as_usual and model.tokenizer is None
    if (resolved.name == EMBEDDED_NAME and plain) or not Path(resolved.location).exists():
        return []
    names = ("load_format", "model_impl", "quantization", "encoder_pool", *RANKS)
    names = names if engine.engine == "baton" else ()
    options = {name: getattr(engine, name) for name in names}
    arguments = json.dumps([resolved.location, options, model.tokenizer, not model.language_model_only])
    child = spawn.run("-m", "baton.cluster.check_model", arguments)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return [Fault("weights", f"{resolved.location} could not be checked: {last}")]
    return [Fault(**fault) for fault in json.loads(child.stdout)]


def check_files(resolved: ResolvedModel, engine: EngineOptions, model: ModelOptions) -> None:
    """Raises ValueError for a model that `baton serve` cannot serve."""
    for fault in faults(resolved, engine, model):
        names_flag = fault.message.startswith("--")
        raise ValueError(fault.message if names_flag else f"--model: {fault.message}")


def _faults(location: str, engine: dict[str, Any], tokenizer: str | None, images: bool = True) -> list[Fault]:
    """`engine`: fields of its configuration. Empty: vLLM, which checks weights itself. `images`: whether
    requests may have some, if the model takes them."""
    from baton.router.text.tokenizer import load_tokenizer

    faults = _engine_faults(location, engine | {"language_model_only": not images}) if engine else []
    try:
        if tokenizer is None or Path(tokenizer).exists():  # else it is on the hub
            load_tokenizer(location, tokenizer=tokenizer, images=images)
    except ValueError as error:
        faults.append(Fault("tokenizer", str(error)))
    return faults


def _engine_faults(location: str, engine: dict[str, Any]) -> list[Fault]:
    cause = "weights"
    try:
        from baton.engine.api.config import EngineConfig
        from baton.engine.loader import check_model

        check_model(EngineConfig(model=location, **engine | RANKS))
        if engine != engine | RANKS:
            cause = "ranks"
            check_model(EngineConfig(model=location, **engine))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
    except ValueError as error:
        return [Fault(cause, str(error))]
    return []


if __name__ == "__main__":
    gc.disable()  # imports make no garbage, and collections would slow them by a sixth
    print(json.dumps([asdict(fault) for fault in _faults(*json.loads(sys.argv[1]))]))
    gc.freeze()  # nor does the end collect any
