"""How many GPUs a worker needs for a model, and how its speeds compare in both pools.

The load is that of agents: sessions of many turns, most of each prompt cached. `needs_of` runs this module
as a child process, because it imports torch, which takes time and memory.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from baton.cluster.gpu_pools import Needs, Ranks
from baton.cluster.model import ResolvedModel
from baton.cluster.options.engine import EngineOptions
from baton.cluster.options.optimize import choose
from baton.processes import spawn
from baton.system.words import counted

NEW_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS = 1_200, 14_300, 150
"""Of a turn of an agent, on average."""


class TooLarge(ValueError):
    """The model does not fit the GPUs."""


def needs_of(
    resolved: ResolvedModel,
    engine: EngineOptions,
    ranks: tuple[int | None, int | None],
    gpus: int,
    gpu_gib: float,
) -> Needs:
    """Asks a child process. A model without known speeds needs one GPU, unless `ranks` says otherwise.

    Args:
        ranks: GPUs of a prefill and of a decode worker, as the user said.
        gpus: how many are free.
        gpu_gib: memory of the smallest.

    Raises TooLarge.
    """
    names = ("quantization", "dtype", "kv_cache_dtype", "max_model_len")
    options = {name: getattr(engine, name) for name in names}
    seats = choose(engine, "cuda", gpu_gib).max_num_seqs
    numbers = (engine.gpu_memory_utilization, seats, engine.itl_target or 0.0)
    arguments = json.dumps([resolved.location, options, ranks, gpus, gpu_gib, numbers])
    child = spawn.run("-m", "baton.cluster.tools.sizing.worker_needs", arguments)
    answer = json.loads(child.stdout) if child.returncode == 0 else {}
    if "error" in answer:
        raise TooLarge(answer["error"])
    if not answer:
        return Needs(Ranks(ranks[0] or 1, ranks[1] or 1))
    return Needs(Ranks(*answer["ranks"]), answer["prefill_rate"], answer["decode_rate"], known=True)


def computed(
    location: str,
    options: dict[str, object],
    given_ranks: Sequence[int | None],
    gpus: int,
    gpu_gib: float,
    numbers: Sequence[float],
) -> Needs:
    """As `needs_of`. Raises TooLarge, and other errors for a model without known speeds.

    Args:
        numbers: share of the memory, seats of a worker, and the longest step with decodes in ms; 0: any.
    """
    import torch

    from baton.cluster.tools.sizing.speeds import H200, Speeds, as_kept, opened
    from baton.engine.api.config import EngineConfig
    from baton.engine.kernels import FP8
    from baton.engine.loader import planned_format

    utilization, seats, longest_step = numbers
    checkpoint = opened(location)
    model = checkpoint.config
    if model.state is not None:
        raise NotImplementedError("no speeds were measured for state layers")
    config = EngineConfig(location, quantization=str(options["quantization"]), dtype=str(options["dtype"]))
    weight_format = planned_format(config, checkpoint, torch.device("cuda"))
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    kv_dtype = FP8 if options["kv_cache_dtype"] == "fp8" else torch.bfloat16
    gpu = replace(H200, memory=int(gpu_gib * (1 << 30)))
    context = int(str(options["max_model_len"] or model.max_model_len))

    positions = NEW_TOKENS + CACHED_TOKENS + OUTPUT_TOKENS / 2

    def of_worker(ranks: int) -> Speeds:
        return as_kept(gpu, model, weight_format, dtype, ranks, kv_dtype, positions, utilization, context)

    def speeds(ranks: int) -> Speeds | None:
        """None: the model does not divide into so many, or leaves no room for KV."""
        try:
            worker = of_worker(ranks)
            worker.kv_room(utilization)
        except ValueError:
            return None
        return worker

    fitting = {ranks: worker for ranks in range(1, gpus + 1) if (worker := speeds(ranks)) is not None}
    if not fitting:
        raise TooLarge(
            f"--model {location}: {counted(gpus, 'GPU')} of {gpu_gib:.0f} GiB cannot hold it; use more or "
            "larger GPUs, --quantization fp8, or a smaller model"
        )

    # They hold the weights and the KV of one longest request. Otherwise it is the most.
    fewest = next(
        (ranks for ranks, worker in fitting.items() if worker.holds(context, utilization)), max(fitting)
    )
    ranks = Ranks(given_ranks[0] or fewest, given_ranks[1] or fewest)
    of_prefill, of_decode = map(of_worker, ranks)
    room = of_decode.kv_room(utilization)
    batch = min(int(seats), int(room / of_decode.kv_bytes(positions)))
    if longest_step:
        batch = min(batch, of_decode.steps.fitting_rows(positions, longest_step / 1e3))
    batch = max(1, batch)
    return Needs(
        ranks,
        1 / of_prefill.steps.prefill(NEW_TOKENS, CACHED_TOKENS),
        batch / (OUTPUT_TOKENS * of_decode.steps.decode(batch, batch * positions)),
        known=True,
    )


def _main(arguments: str) -> dict[str, object]:
    try:
        needs = computed(*json.loads(arguments))
    except TooLarge as error:
        return {"error": str(error)}
    return {"ranks": needs.ranks, "prefill_rate": needs.prefill_rate, "decode_rate": needs.decode_rate}


if __name__ == "__main__":
    print(json.dumps(_main(sys.argv[1])))
