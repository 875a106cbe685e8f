"""An engine with random weights on a GPU: a model's shape, in a format of its weights and its KV.

A decode row is the time from step to step with about 1,064 tokens of context. A prefill row is the time from
arrival to the last first token, in chunks of 16,384 tokens. The goal of a row is its *must*. `.floor` is a
lower bound of the same run: for the dense shape the plain products by cuBLAS and the KV (`floor`), for others
the time of the bytes that a step reads and writes.

Of a mixture of experts only those with tokens are read: `.experts` is their number, per layer and step,
counted while the requests decode. A model with state layers is compared with the dense shape in the same run.
Of a layer with a window the KV in it is read. A layer that reads the KV of another one reads its bytes, too.

`.predicted` says how well the engine's model of steps predicts them (`drive.predicted_steps`).

With `--batch-invariant` a second engine, in the exact mode, runs after the first one. `.exact` is the time of
the same work there, and its ratio to the default.
"""

import argparse
import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.bench.lab.driver import Run, median_ms
from baton.bench.lab.engine.drive import (
    add_predicted,
    add_step_model,
    decode_step_seconds,
    drain,
    fill,
    predicted_steps,
    prefill_seconds,
    prompt,
)  # fmt: skip
from baton.bench.lab.engine.floor import Floor, Fp8Floor
from baton.bench.lab.kernels.cases import BYTES_PER_S
from baton.bench.lab.shapes import DENSE, HYBRIDS, LATENT, MOE, SEEING, SHAPES, SPARSE, WINDOWED, write_shape
from baton.bench.report import Row
from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.loader.hf_config import model_config_from_hf
from baton.engine.models.cache_spec import SharedCache
from baton.kv_names import cache_kinds
from baton.steps.quantiles import percentile

CONTEXT = 1064
BUDGET, LONGEST = 16384, 131072
REQUESTS = 192
"""Of which the steps are predicted."""
COUNTED = 32
"""Decode steps that `.experts` is the mean of."""
INT4_GROUP = 128
"""Columns of a group of INT4 weights."""

Bound = float | None  # ms
_NO_BOUND: dict[int, Bound] = dict.fromkeys((1, 8, 32, 64, 128, 256))
_NO_PREFILL_BOUND: dict[tuple[int, int], Bound] = dict.fromkeys([(1, 2000), (1, 8000), (4, 2000)])


@dataclass(frozen=True)
class Case:
    """What runs, and what it must take in ms.

    Attributes:
        decode: by batch.
        prefill: by (requests, tokens of each).
        floor: the products by cuBLAS; None: the time of the bytes.
        bytes, output_bytes: of a parameter, and of one of the output projection.
        over_floor: what a decode step without a bound must take, in times of its floor.
    """

    name: str
    decode: Mapping[int, Bound]
    prefill: Mapping[tuple[int, int], Bound]
    floor: type[Floor] | None = Floor
    bytes: float = 2
    output_bytes: float = 2
    over_floor: float | None = None


DENSE_CASES = {
    (None, None): Case(
        "engine",
        {1: 4.5, 8: 4.8, 32: 5.8, 64: 6.9, 128: 9.8, 256: 16.8},
        {(1, 2000): 49.8, (1, 8000): 212.0, (4, 2000): 194.0, (16, 2000): 752.0},
    ),
    ("fp8", None): Case(
        "engine.fp8",
        {1: 3.2, 8: 3.5, 32: 4.6, 64: 5.6, 128: 8.4, 256: 14.8},
        {(1, 2000): 30.5, (1, 8000): 138.0, (4, 2000): 122.0},
        Fp8Floor,
        bytes=1,
    ),
    (None, "fp8"): Case("engine.fp8_kv", _NO_BOUND, _NO_PREFILL_BOUND),
    ("fp8", "fp8"): Case("engine.fp8_fp8_kv", _NO_BOUND | {256: 10.5}, _NO_PREFILL_BOUND, Fp8Floor, bytes=1),
    ("int4", None): Case(
        "engine.int4",
        {1: 2.2, 8: 3.2, 32: 4.2, 64: 5.6, 128: 9.7, 256: 15.9},
        {(1, 2000): 50.4, (1, 8000): 220.0, (4, 2000): 202.0},
        bytes=1 / 2 + 2 / INT4_GROUP,
        output_bytes=1,
    ),
}
"""By --quantization and --kv-cache-dtype."""
MOE_CASES = {
    None: Case(
        "engine.moe",
        {1: 4.0, 8: 8.9, 32: 15.8, 64: 18.0, 128: 20.0, 256: 25.0},
        {(1, 2000): 39.0, (1, 8000): 145.0, (4, 2000): 121.0},
        floor=None,
    ),
    "fp8": Case(
        "engine.moe.fp8",
        {1: 4.06, 8: 4.52, 32: 5.61, 64: 6.60, 128: 9.08, 256: 14.0},
        {(1, 2000): 40.0, (1, 8000): 120.0, (4, 2000): 92.0},
        floor=None,
        bytes=1,
    ),
    "int4": Case(
        "engine.moe.int4",
        {1: 3.1, 8: 7.8, 32: 14.7, 64: 17.3, 128: 19.6, 256: 24.0},
        {(1, 2000): 29.5, (1, 8000): 137.0, (4, 2000): 119.0},
        floor=None,
        bytes=1 / 2 + 2 / INT4_GROUP,
        output_bytes=1,
    ),
}
HYBRID_CASE = Case(
    "engine.hybrid",
    _NO_BOUND,
    dict.fromkeys([(1, 2000), (1, 8000), (1, 32000), (1, 128000)]),
    floor=None,
    over_floor=1.15,
)
WINDOWED_CASE = Case(
    "engine.windows",
    _NO_BOUND,
    _NO_PREFILL_BOUND | {(1, 32000): None},
    floor=None,
)
SEEING_CASE = Case("engine.images", _NO_BOUND, _NO_PREFILL_BOUND, floor=None)
LATENT_CASES = {
    None: Case(
        "engine.latent",
        _NO_BOUND | {1: 3.4},
        {(1, 2000): 45.0, (1, 8000): 150.0, (4, 2000): 140.0},
        floor=None,
        over_floor=1.35,
    ),
    "fp8": Case(
        "engine.latent.fp8",
        _NO_BOUND | {1: 3.0},
        {(1, 2000): 40.0, (1, 8000): 125.0, (4, 2000): 115.0},
        floor=None,
        bytes=1,
        over_floor=1.35,
    ),
}


SPARSE_CASES = {
    form: replace(
        of_latents,
        name=of_latents.name.replace("latent", "sparse"),
        decode=_NO_BOUND,
        prefill=_NO_PREFILL_BOUND,
    )
    for form, of_latents in LATENT_CASES.items()
}
CASES: Mapping[tuple[str, str | None], Case] = {
    **{(shape, None): HYBRID_CASE for shape in HYBRIDS},
    **{(shape, None): WINDOWED_CASE for shape in WINDOWED},
    (SEEING, None): SEEING_CASE,
    **{(LATENT, form): case for form, case in LATENT_CASES.items()},
    **{(SPARSE, form): case for form, case in SPARSE_CASES.items()},
    **{(MOE, form): case for form, case in MOE_CASES.items()},
}
"""By shape and --quantization. The dense shape has cases of its own."""


def case_of(args: argparse.Namespace) -> Case | None:
    """None if the shape is not measured in this format."""
    if args.model_shape == DENSE:
        return DENSE_CASES.get((args.quantization, args.kv_cache_dtype))
    return None if args.kv_cache_dtype else CASES.get((args.model_shape, args.quantization))


def measure(run: Run) -> None:
    case = case_of(run.args)
    assert case is not None, "checked with the arguments"
    floors = _floors(case)
    steps, rounds = (32, 3) if run.short else (128, 9)
    dense: dict[tuple[int, int], float] = {}
    if case is HYBRID_CASE:
        with_attention = engine_of(run, 8, shape=DENSE)
        dense = {work: prefill_ms(with_attention, *work, rounds=2)[0] for work in case.prefill}
        with_attention.close()
        del with_attention
    engine = engine_of(run, 256)
    _prefills(engine, case, run, floors, dense, rounds)
    _decodes(engine, case, run, floors, steps)
    add_predicted(run, case.name, predicted_steps(engine, REQUESTS, CONTEXT, COUNTED))
    add_step_model(run, engine)
    engine.close()
    del engine
    if run.args.batch_invariant:
        engine = engine_of(run, 256, exact=True)
        _compare_exact(engine, case, run, rounds, steps)
        engine.close()


EXACT_DECODE, EXACT_PREFILL = 1.10, 1.25
"""What the exact mode may take, in times of the default."""


def _compare_exact(engine: Engine, case: Case, run: Run, rounds: int, steps: int) -> None:
    default = {row.name: row.value for row in run.rows}
    measured = {
        f"{case.name}.prefill.{n}x{tokens}": (prefill_ms(engine, n, tokens, rounds=rounds)[0], EXACT_PREFILL)
        for n, tokens in case.prefill
    }
    for batch in case.decode:
        ms = median_ms(decode_step_seconds(engine, batch, CONTEXT, steps))
        measured[f"{case.name}.decode.b{batch}"] = ms, EXACT_DECODE
    for name, (ms, most) in measured.items():
        ratio, goal = ms / default[name], most * default[name]
        run.add(Row(f"{name}.exact", ms, "ms", ratio=ratio, ratio_to="the default, same run", goal=goal))


def _prefills(
    engine: Engine,
    case: Case,
    run: Run,
    floors: Mapping[tuple[int, ...], float],
    dense: Mapping[tuple[int, int], float],
    rounds: int,
) -> None:
    """`dense`: what the dense shape takes in ms, if it was measured."""
    for (requests, tokens), must in case.prefill.items():
        ms, p99 = prefill_ms(engine, requests, tokens, rounds=rounds if tokens <= 8000 else 2)
        name = f"{case.name}.prefill.{requests}x{tokens}"
        run.add(Row(name, ms, "ms", p99=p99, goal=must))
        if (floor := floors.get((requests, tokens))) is not None:
            _add_floor(run, name, ms, floor)
        if (other := dense.get((requests, tokens))) is not None:
            run.add(Row(f"{name}.dense", other, "ms", ratio=ms / other, ratio_to=f"{DENSE}, same run"))


def _decodes(
    engine: Engine, case: Case, run: Run, floors: Mapping[tuple[int, ...], float], steps: int
) -> None:
    for batch, must in case.decode.items():
        times = decode_step_seconds(engine, batch, CONTEXT, steps)
        name, ms = f"{case.name}.decode.b{batch}", median_ms(times)
        experts = experts_read(engine, batch, CONTEXT) if engine.model_config.experts else None
        bound = bytes_moved(engine, case, batch, CONTEXT, experts) / BYTES_PER_S * 1e3
        floor = floors.get((batch,), bound)
        p99 = percentile(times, 0.99) * 1e3
        goal = case.over_floor * floor if must is None and case.over_floor else must
        run.add(Row(name, ms, "ms", p99=p99, goal=goal))
        _add_floor(run, name, ms, floor)
        if experts is not None:
            run.add(Row(f"{name}.experts", experts, "per layer and step"))


def _floors(case: Case) -> dict[tuple[int, ...], float]:
    """The times of the products by cuBLAS in ms: of a decode step by (batch,), of a prefill by (requests,
    tokens of each). Empty if the case has another floor."""
    if case.floor is None:
        return {}
    config = model_config_from_hf(SHAPES[DENSE], {}, DENSE)
    # Of K or V of a head: two bytes a number, or one and the scale.
    vector = config.head_dim + 4 if case.name.endswith("fp8_kv") else 2 * config.head_dim
    floor = case.floor(config, 2 * config.num_layers * config.num_kv_heads * vector)
    times: dict[tuple[int, ...], float] = {(batch,): floor.decode_ms(batch, CONTEXT) for batch in case.decode}
    return times | {work: floor.prefill_ms(*work) for work in case.prefill}


def engine_of(
    run: Run, running: int, *, shape: str = "", exact: bool = False, longest: int = BUDGET
) -> Engine:
    """An engine without a limit on the chunks of prompts. The memory of one before is free again. `shape`: in
    place of that of the run."""
    args, shape = run.args, shape or run.args.model_shape
    gc.collect()
    torch.cuda.empty_cache()
    return build_engine(
        EngineConfig(
            str(write_shape(shape, run.directory, tokenizer=shape == SEEING)),
            dtype="bfloat16",
            device="cuda",
            load_format="dummy",
            quantization=args.quantization or "auto",
            kv_cache_dtype=args.kv_cache_dtype or "auto",
            state_dtype=(args.state_dtype if shape in HYBRIDS else None) or "auto",
            max_model_len=LONGEST if args.model_shape in (*HYBRIDS, *WINDOWED) else longest,
            enable_prefix_caching=False,
            max_num_seqs=running,
            max_num_batched_tokens=BUDGET,
            itl_target=60.0,  # no limit on the chunks of prompts beside decodes
            batch_invariant=exact,
            elastic_memory=False if args.positions else None,  # `positions` writes all of the cache
        )
    )


def _add_floor(run: Run, name: str, ms: float, floor: float) -> None:
    run.add(Row(f"{name}.floor", floor, "ms", ratio=ms / floor, ratio_to="the floor, same run"))


def prefill_ms(engine: Any, requests: int, tokens: int, *, rounds: int) -> tuple[float, float]:
    """The median and the p99 of the times of such prompts, in ms. The first round warms up."""
    times = [
        prefill_seconds(engine, [prompt(tokens, 100 * r + n + tokens) for n in range(requests)])
        for r in range(rounds + 1)
    ][1:]
    return median_ms(times), percentile(times, 0.99) * 1e3


def experts_read(engine: Engine, batch: int, context: int) -> float:
    """Experts with tokens, per layer and step, while `batch` requests decode."""
    load = engine.runner.expert_load
    assert load is not None
    fill(engine, batch, context - COUNTED // 2, 3 * COUNTED)
    for _ in range(3):  # no counted step has a prompt
        engine.loop.step()
    before, steps = load.totals.clone(), int(load.steps)
    for _ in range(COUNTED):
        engine.loop.step()
    _, reads = load.totals - before
    steps = int(load.steps) - steps
    drain(engine)
    return int(reads.sum()) / len(reads) / steps


def bytes_moved(engine: Any, case: Case, batch: int, context: int, experts: float | None) -> float:
    """Bytes that a decode step reads and writes. `experts`: as in `weight_bytes`."""
    return weight_bytes(engine, case, batch, experts) + batch * cache_bytes_moved(engine, context)


def cache_bytes_moved(engine: Any, positions: int) -> int:
    """Bytes of the cache of one request that a decode at so many positions reads: the KV in the window of a
    layer, the latents that an index chooses, and states, which it writes, too."""
    latent, moved = engine.model_config.latent, 0
    chosen = latent.index.most_chosen if latent is not None and latent.index is not None else positions
    for layer in engine.cache_spec:
        source = engine.cache_spec[layer.source] if isinstance(layer, SharedCache) else layer
        for array in source.arrays:
            visible = positions if array.window is None else min(positions, array.window.length)
            tokens = min(visible, chosen) if array.kind == cache_kinds.LATENT else visible
            ways = 1 if array.per_token else 2
            moved += ways * array.bytes_of(array.heads, tokens)
    return moved


def weight_bytes(engine: Any, case: Case, batch: int, experts: float | None) -> float:
    """Bytes of the weights that a decode step reads. `experts`: those that are read in each layer; None: as
    many as random routes are expected to choose."""
    config = engine.model_config
    head = config.vocab_size * config.hidden_size
    matrices = config.parameters_read(batch) - config.embedding_parameters
    if experts is not None:
        one = 3 * config.hidden_size * config.experts.intermediate_size * len(config.experts.layers)
        matrices += (experts - config.experts.read_by(batch)) * one
    return case.output_bytes * head + case.bytes * matrices
