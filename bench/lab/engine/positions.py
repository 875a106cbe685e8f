"""Decodes at many positions, and prompts of several lengths: `--positions`.

The requests of a decode row join with a cache of zeros, as if their KV had come from a prefill worker. So a
row at 128,000 positions takes seconds, and each request has memory of its own. A row whose KV does not fit is
left out. `.floor` is the time of the bytes that a step reads: the weights, and of the cache what attention
reads. With an index that is all index keys, and the latents of the chosen positions. With a window it is the
KV in the window.
"""

from typing import Any

from baton.bench.lab.driver import Run, median_ms
from baton.bench.lab.engine.drive import drain, greedy, prompt, step_gaps
from baton.bench.lab.engine.on_gpu import LONGEST, Case, bytes_moved, case_of, engine_of, prefill_ms
from baton.bench.lab.kernels.cases import BYTES_PER_S
from baton.bench.report import Row
from baton.steps.quantiles import percentile

BATCHES = (1, 8, 32, 64)
POSITIONS = (2000, 8000, 32000, 128000)
PROMPTS = (8000, 32000)
MARGIN = 8
"""Steps before and after those that count."""


def measure(run: Run) -> None:
    case = case_of(run.args)
    assert case is not None, "checked with the arguments"
    steps = 16 if run.short else 64
    engine = engine_of(run, max(BATCHES), longest=LONGEST)
    for tokens in PROMPTS:
        ms, p99 = prefill_ms(engine, 1, tokens, rounds=1 if run.short else 3)
        run.add(Row(f"{case.name}.prefill.1x{tokens}", ms, "ms", p99=p99))
    clear(engine)
    for positions in POSITIONS:
        for batch in BATCHES:
            _add(run, case, engine, batch, positions, steps)
    engine.close()


def _add(run: Run, case: Case, engine: Any, batch: int, positions: int, steps: int) -> None:
    gaps = decode_gaps(engine, batch, positions, steps)
    if gaps is None:
        return
    name, ms = f"{case.name}.decode.b{batch}.at{positions}", median_ms(gaps)
    floor = bytes_moved(engine, case, batch, positions, None) / BYTES_PER_S * 1e3
    run.add(Row(name, ms, "ms", p99=percentile(gaps, 0.99) * 1e3))
    run.add(Row(f"{name}.floor", floor, "ms", ratio=ms / floor, ratio_to="the floor, same run"))


def decode_gaps(engine: Any, batch: int, positions: int, steps: int) -> list[float] | None:
    """Seconds of each of `steps` steps in which `batch` requests decode at about so many positions. None: the
    cache has no room for them."""
    first = greedy(prompt(positions - steps // 2, 0), steps + 2 * MARGIN)
    lives = []
    for _ in range(batch):
        request = greedy(first.prompt_ids, steps + 2 * MARGIN)
        live = engine.reserve(request)
        if live is None:
            for other in lives:
                engine.cancel(other)
            return None
        lives.append(live)
    for number, live in enumerate(lives):
        engine.join(live, 100 + number)
    gaps = step_gaps(engine, batch, steps, MARGIN)
    drain(engine)
    return gaps


def clear(engine: Any) -> None:
    """The cache is zeros: numbers, and no other request's."""
    for spec, cache in zip(engine.cache_spec, engine.caches, strict=True):
        for plane in spec.planes(cache):
            for x in plane:
                x.zero_()
